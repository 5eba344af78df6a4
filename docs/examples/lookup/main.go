// SPDX-License-Identifier: Apache-2.0

// Command lookup asks a server how much of a prompt it has. An engine makes tokens of the prompt: vLLM, or kvasir engine.
//
//	go run ./docs/examples/lookup -server 127.0.0.1:5555 -engine http://127.0.0.1:8000 -model Qwen/Qwen2.5-7B-Instruct "a long prompt"
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
)

func main() {
	server := flag.String("server", "127.0.0.1:5555", "LMCache port of kvasir server")
	engine := flag.String("engine", "http://127.0.0.1:8000", "engine that makes tokens of the prompt")
	model := flag.String("model", "", "model, as the engine names it to the server")
	ranks := flag.Int("ranks", 1, "the engine's tensor parallel ranks")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := lookup(ctx, *server, *engine, *model, *ranks, flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, "lookup:", err)
		os.Exit(1)
	}
}

func lookup(ctx context.Context, server, engine, model string, ranks int, prompt string) (err error) {
	tokens, err := tokenize(ctx, engine, model, prompt)
	if err != nil {
		return err
	}
	c, err := lmcache.NewClient(server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	chunk, err := c.Negotiate(ctx, 1) // once before the first lookup
	if err != nil {
		return err
	}
	key := &lmcache.Key{
		Model: model, WorldSize: ranks, Worker: lmcache.AllWorkers, Tokens: tokens, End: len(tokens), RequestID: "lookup-example", Readers: 1, Packed: c.Enveloped(),
	}
	chunks, err := c.Lookup(ctx, key)
	if err != nil {
		return err
	}
	fmt.Printf("%d of %d tokens are in the pool, in chunks of %d\n", chunks*chunk, len(tokens), chunk)
	return c.EndSession(ctx, key.RequestID) // ends the pins of the lookup
}

func tokenize(ctx context.Context, engine, model, prompt string) ([]uint32, error) {
	body, err := json.Marshal(map[string]string{"model": model, "prompt": prompt})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, engine+"/tokenize", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	var answer struct{ Tokens []uint32 }
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the engine answers /tokenize with %s", res.Status)
	}
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
		return nil, fmt.Errorf("read the engine's tokens: %w", err)
	}
	return answer.Tokens, nil
}
