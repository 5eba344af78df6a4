// SPDX-License-Identifier: Apache-2.0

// Command bench is this module's client of Mooncake Store as interop/store/race.py drives it: a
// command per line of standard input, an answer per line of standard output, both JSON.
//
//	bench HOST:PORT
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// command is what race.py asks for.
type command struct {
	Do      string   // exist, put, get, sum
	Keys    []string // exist: asked for in each call, or one after another; sum: one
	Batch   bool     // exist: all keys in one call
	Calls   int      // exist
	Tag     string   // of the keys of put and get
	Bytes   int      // put, get: of an object
	N       int      // put, get: objects of a call
	Seconds float64  // put, get
	Segment string   // put, get: preferred
	Keep    bool     // put: the last call's objects stay, until sum
}

// answer is what a cell took.
type answer struct {
	P50, P99 float64 // microseconds of a call
	CPU      float64 // microseconds of the process in a call
	GBps     float64
	Calls    int
	Present  int      // exist: of the last call
	Keys     []string // put: of the last call
	Sum      string   // sum, put with Keep: sha256 of the first object
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	m, err := store.NewMaster(store.MasterOptions{Addresses: os.Args[1:]})
	if err != nil {
		return err
	}
	defer m.Close()
	te := transfer.New(transfer.Options{})
	defer te.Close()
	b := &bench{m: m, te: te, memory: make([]byte, 128<<20)}
	rand.Read(b.memory)
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<24)
	out := json.NewEncoder(os.Stdout)
	for in.Scan() {
		var c command
		if err := json.Unmarshal(in.Bytes(), &c); err != nil {
			return err
		}
		a, err := b.do(&c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.Do, err)
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
	return in.Err()
}

type bench struct {
	m      *store.Master
	te     *transfer.Client
	memory []byte
	serial int
}

func (b *bench) do(c *command) (answer, error) {
	ctx := context.Background()
	client := store.NewClient(b.m, b.te, store.ClientOptions{Put: store.PutOptions{Segment: c.Segment}})
	switch c.Do {
	case "exist":
		return b.exist(ctx, c)
	case "put":
		return b.put(ctx, client, c)
	case "get":
		return b.get(ctx, client, c)
	case "sum":
		object := b.memory[:c.Bytes]
		clear(object)
		if err := client.Get(ctx, []store.Object{{Key: c.Keys[0], Parts: [][]byte{object}}})[0]; err != nil {
			return answer{}, err
		}
		sum := sha256.Sum256(object)
		rand.Read(object[:min(len(object), 1<<20)])
		return answer{Sum: hex.EncodeToString(sum[:])}, b.remove(ctx, c.Keys)
	}
	return answer{}, errors.New("unknown")
}

// timer collects the times of calls and the processor time in them.
type timer struct {
	took  []time.Duration
	cpu   time.Duration
	whole time.Duration
}

func processor() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (t *timer) time(f func()) {
	cpu, began := processor(), time.Now()
	f()
	took := time.Since(began)
	t.took = append(t.took, took)
	t.whole += took
	t.cpu += processor() - cpu
}

func (t *timer) answer(bytes int) answer {
	slices.Sort(t.took)
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	n := len(t.took)
	a := answer{P50: us(t.took[n/2]), P99: us(t.took[n*99/100]), CPU: us(t.cpu) / float64(n), Calls: n}
	if bytes > 0 {
		a.GBps = float64(bytes) * float64(n) / float64(t.whole)
	}
	return a
}

func (b *bench) exist(ctx context.Context, c *command) (answer, error) {
	var t timer
	keys, present := c.Keys, make([]bool, len(c.Keys))
	cpu := processor()
	for i := range c.Calls {
		ask, into := keys, present
		if !c.Batch {
			ask, into = keys[i%len(keys):][:1], present[:1]
		}
		began := time.Now()
		if err := b.m.Exists(ctx, ask, into); err != nil {
			return answer{}, err
		}
		t.took = append(t.took, time.Since(began))
	}
	t.cpu = processor() - cpu
	a := t.answer(0)
	for _, there := range present {
		if there {
			a.Present++
		}
	}
	return a, nil
}

// objects returns N objects of the command, with keys of their own.
func (b *bench) objects(c *command) ([]store.Object, []string) {
	objects, keys := make([]store.Object, c.N), make([]string, c.N)
	for i := range objects {
		b.serial++
		keys[i] = fmt.Sprintf("%-150s", fmt.Sprintf("go-%s-%d@model/some-longer-name-7b@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@%064x", c.Tag, b.serial, b.serial))
		objects[i] = store.Object{Key: keys[i], Parts: [][]byte{b.memory[i*c.Bytes:][:c.Bytes]}}
	}
	return objects, keys
}

func (b *bench) remove(ctx context.Context, keys []string) error {
	for _, k := range keys {
		if err := b.m.Remove(ctx, k, true); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) put(ctx context.Context, client *store.Client, c *command) (answer, error) {
	var t timer
	var keys []string
	for end := time.Now().Add(time.Duration(c.Seconds * 1e9)); len(t.took) < 3 || time.Now().Before(end); {
		if err := b.remove(ctx, keys); err != nil {
			return answer{}, err
		}
		var objects []store.Object
		var errs []error
		objects, keys = b.objects(c)
		t.time(func() { errs = client.Put(ctx, objects) })
		if err := errors.Join(errs...); err != nil {
			return answer{}, err
		}
	}
	a := t.answer(c.Bytes * c.N)
	if c.Keep {
		a.Keys = keys
		sum := sha256.Sum256(b.memory[:c.Bytes])
		a.Sum = hex.EncodeToString(sum[:])
		return a, nil
	}
	return a, b.remove(ctx, keys)
}

func (b *bench) get(ctx context.Context, client *store.Client, c *command) (answer, error) {
	var t timer
	objects, keys := b.objects(c)
	if err := errors.Join(client.Put(ctx, objects)...); err != nil {
		return answer{}, err
	}
	for end := time.Now().Add(time.Duration(c.Seconds * 1e9)); len(t.took) < 3 || time.Now().Before(end); {
		var errs []error
		t.time(func() { errs = client.Get(ctx, objects) })
		if err := errors.Join(errs...); err != nil {
			return answer{}, err
		}
	}
	return t.answer(c.Bytes * c.N), b.remove(ctx, keys)
}
