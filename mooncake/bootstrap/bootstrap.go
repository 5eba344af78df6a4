// SPDX-License-Identifier: Apache-2.0

// Package bootstrap is the registry through which the D side of vLLM's
// MooncakeConnector finds the workers of P: a server that answers as vLLM's
// MooncakeBootstrapServer does, and a client for both sides.
//
// Each P worker registers the address of its ZMQ side channel under its ranks. D reads the whole directory once per engine id. It takes
// the number of TP ranks in the directory as P's TP size, as long as D lives. So a directory must never show half of an engine, or a
// mixture of two engines. docs/operate/bootstrap.md and type Registry have the rules that prevent it.
//
// Wire: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_utils.py,
// 0.31 to 0.33, with FastAPI and pydantic 2; testdata/ has 4,547 recorded answers.
package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Limits of messages. The server refuses a registration or a query beyond them.
const (
	maxBodyBytes     = 64 << 10 // of POST /register
	maxEngineIDBytes = 1024
	maxAddrBytes     = 1024    // of a side channel's address, and of a Client's base address
	maxSize          = 1 << 16 // largest TP, PP or DP size in a registration or a query
)

// Registration is the content of one P worker's registration.
type Registration struct {
	EngineID string `json:"engine_id"`
	DPRank   int    `json:"dp_rank"`
	TPRank   int    `json:"tp_rank"`
	PPRank   int    `json:"pp_rank"`
	Addr     string `json:"addr"` // address of the side channel, tcp://ip:port

	// Stock workers do not send the fields below, and a stock server ignores them. TPSize and PPSize are the sizes of the whole engine,
	// 0 if unknown; with them, the directory does not show the engine before all its workers are registered. With a Lease, the
	// registration ends unless the worker repeats it in that time; 0 means that it stays.
	TPSize int           `json:"tp_size,omitempty"`
	PPSize int           `json:"pp_size,omitempty"`
	Lease  time.Duration `json:"-"` // sent as "lease_s", in seconds
}

// body returns the JSON body of POST /register, with its keys in vLLM's order.
func (r Registration) body() ([]byte, error) {
	return json.Marshal(struct {
		Registration
		LeaseS float64 `json:"lease_s,omitempty"`
	}{r, r.Lease.Seconds()})
}

// Engine is one P engine in a Directory.
type Engine struct {
	ID      string
	Workers map[int]map[int]string // TP rank → PP rank → address of the side channel
}

// TPSize returns how many TP ranks are known. D takes that number as the engine's TP size.
func (e Engine) TPSize() int { return len(e.Workers) }

// Directory is the answer of GET /query: DP rank → engine.
type Directory map[int]Engine

// Engine returns the engine of that id, and its DP rank. ok is false if the directory has no such engine.
func (d Directory) Engine(id string) (dpRank int, e Engine, ok bool) {
	for dp, e := range d {
		if e.ID == id {
			return dp, e, true
		}
	}
	return 0, Engine{}, false
}

// errDirectory means that an answer to GET /query is not a directory.
var errDirectory = errors.New("bootstrap: the answer is not a directory of engines")

// parseDirectory decodes an answer of GET /query:
//
//	{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://10.0.0.7:41233"}}}}
//
// Ranks are decimal integers in strings; unknown keys are ignored. Errors wrap errDirectory.
func parseDirectory(body []byte) (Directory, error) {
	if len(body) > maxDirectoryBytes {
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d", errDirectory, len(body), maxDirectoryBytes)
	}
	var raw map[string]struct {
		EngineID   *string                      `json:"engine_id"`
		WorkerAddr map[string]map[string]string `json:"worker_addr"`
	}
	if err := json.Unmarshal(body, &raw); err != nil {
		return nil, fmt.Errorf("%w: %w", errDirectory, err)
	}
	if raw == nil {
		return nil, fmt.Errorf("%w: it is null", errDirectory)
	}
	d := make(Directory, len(raw))
	for dpText, in := range raw {
		dp, err := parseRank("dp_rank", dpText)
		if err != nil {
			return nil, err
		}
		if in.EngineID == nil || in.WorkerAddr == nil {
			return nil, fmt.Errorf("%w: dp_rank %d has no engine_id or no worker_addr", errDirectory, dp)
		}
		e := Engine{ID: *in.EngineID, Workers: make(map[int]map[int]string, len(in.WorkerAddr))}
		for tpText, pps := range in.WorkerAddr {
			tp, err := parseRank("tp_rank", tpText)
			if err != nil {
				return nil, err
			}
			byPP := make(map[int]string, len(pps))
			for ppText, addr := range pps {
				pp, err := parseRank("pp_rank", ppText)
				if err != nil {
					return nil, err
				}
				byPP[pp] = addr
			}
			e.Workers[tp] = byPP
		}
		d[dp] = e
	}
	return d, nil
}

// parseRank reads a rank, the text of a JSON key. It accepts only the canonical decimal text, so that two keys cannot name one rank. The
// error of another text says that it is no `what`.
func parseRank(what, text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || strconv.Itoa(n) != text {
		return 0, fmt.Errorf("%w: key %.40q is no %s", errDirectory, text, what)
	}
	return n, nil
}
