// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

// Simulation configures a simulated vLLM engine with tiered offloading, as a node sees it: a region, and requests that store and load rows.
type Simulation struct {
	Socket   string
	EngineID string
	Model    string
	Dir      string // of the region; default /dev/shm
	RowBytes int64  // default 64 KiB
	Prompts  int    // number of different prompts; default 64
	Longest  int    // most rows of a prompt; default 24
	Requests int    // 0: until ctx ends
	Seed     uint64
	Log      *slog.Logger // nil discards
}

// SimulationResult counts the results of an engine's requests.
type SimulationResult struct {
	Requests int `json:"requests"`
	Asked    int `json:"asked_rows"`
	Loaded   int `json:"loaded_rows"`
	Lost     int `json:"lost_rows"` // found, and not loaded because the connection ended
	Stored   int `json:"stored_rows"`
	Wrong    int `json:"wrong_rows"` // loaded with other bytes than were stored
	Without  int `json:"requests_without_node"`
}

const (
	playPatience = 2 * time.Second        // time that the node has for an answer, as in the module of vLLM
	playRetry    = 200 * time.Millisecond // between two tries to connect
)

// player is a running Play.
type player struct {
	Simulation
	region *shm.Segment
	file   *os.File // of the region
	client *Client
	retry  time.Time
	out    SimulationResult
}

// RunPlay plays requests on a tier socket. Each looks up the rows of a prompt, loads and compares the leading ones that are present, and
// stores the others. If the node ends or does not answer, the rows are misses.
func RunPlay(ctx context.Context, o Simulation) (_ SimulationResult, err error) {
	o.RowBytes, o.Prompts, o.Longest = cmp.Or(o.RowBytes, 64<<10), cmp.Or(o.Prompts, 64), cmp.Or(o.Longest, 24)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &player{Simulation: o}
	name, err := RegionName(o.EngineID)
	if err != nil {
		return p.out, err
	}
	path, err := shm.Path(o.Dir, name)
	if err != nil {
		return p.out, err
	}
	if p.region, err = shm.Create(path, o.RowBytes*int64(o.Longest)); err != nil {
		return p.out, err
	}
	defer func() { err = errors.Join(err, p.region.Unlink(), p.region.Close()) }()
	if err := p.region.Populate(0, p.region.Len(), true); err != nil && !errors.Is(err, shm.ErrNoPopulate) { // otherwise a full /dev/shm kills this process
		return p.out, err
	}
	if p.file, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return p.out, err
	}
	defer p.file.Close()
	defer p.hangUp()
	rng := rand.New(rand.NewPCG(o.Seed, 1))
	for ctx.Err() == nil && (o.Requests == 0 || p.out.Requests < o.Requests) {
		if err := p.request(ctx, rng.IntN(o.Prompts), 1+rng.IntN(o.Longest)); err != nil {
			return p.out, err
		}
	}
	return p.out, nil
}

// hangUp ends the connection.
func (p *player) hangUp() {
	if p.client != nil {
		_ = p.client.Close() // the node may have ended it
		p.client = nil
	}
}

// connect connects if no connection stands. It returns only errors that do not pass by themselves.
func (p *player) connect(ctx context.Context) error {
	if p.client != nil && !p.client.Connected() {
		p.hangUp()
	}
	if p.client != nil || time.Now().Before(p.retry) {
		return nil
	}
	h := Hello{
		Protocol: Protocol, VLLM: "kvasir engine", EngineID: p.EngineID, Model: p.Model, Namespace: "kvasir engine",
		RowBytes: p.RowBytes, Rows: int64(p.Longest), Groups: 1, ChunkTokens: 16,
	}
	client, err := Dial(p.Socket, h, p.file, len(kv.Hash{}))
	if errors.Is(err, ErrRefused) || ctx.Err() != nil {
		return err
	}
	if err != nil {
		p.Log.Warn("no Kvasir server answers on the socket: requests find nothing until one does", "socket", p.Socket, "err", err)
		p.retry = time.Now().Add(playRetry)
		return nil
	}
	p.client = client
	return nil
}

// request plays one request.
func (p *player) request(ctx context.Context, prompt, rows int) error {
	if err := p.connect(ctx); err != nil {
		return err
	}
	p.out.Requests++
	if p.client == nil {
		p.out.Without++
		select {
		case <-ctx.Done():
		case <-time.After(time.Until(p.retry)):
		}
		return nil
	}
	keys := make([]Key, rows)
	for i := range keys {
		keys[i].Hash = playHash(prompt, i)
	}
	name := fmt.Sprintf("%s-%d", p.EngineID, p.out.Requests)
	p.out.Asked += rows
	have := p.load(name, keys)
	p.store(name, keys[have:])
	return nil
}

// load loads the leading rows that are present, and returns their number.
func (p *player) load(name string, keys []Key) (have int) {
	id, places, err := p.client.Lookup("", name, keys, playPatience)
	if err != nil {
		return 0
	}
	for have < len(places) && places[have].Offset != NoPlace {
		row := p.client.Pool(places[have])
		if int64(len(row)) != p.RowBytes {
			break
		}
		copy(p.row(have), row)
		have++
	}
	if !p.client.Connected() {
		p.out.Lost += have
		return 0
	}
	for i := range have {
		if !bytes.Equal(p.row(i), p.body(keys[i])) {
			p.out.Wrong++
		}
	}
	p.out.Loaded += have
	_ = p.client.Release(Released{ID: id, Loaded: uint32(have)}) // the connection may have ended
	return have
}

// store stores rows.
func (p *player) store(name string, keys []Key) {
	if len(keys) == 0 {
		return
	}
	id, places, err := p.client.Store("", name, keys, playPatience)
	if err != nil {
		return
	}
	stored, whole := 0, len(places) == len(keys)
	for i := 0; whole && i < len(places); i++ {
		if places[i].Offset == NoPlace {
			continue
		}
		to := p.client.Pool(places[i])
		if whole = int64(len(to)) == p.RowBytes; whole {
			copy(p.row(i), p.body(keys[i])) // in vLLM the GPU does this
			copy(to, p.row(i))
			stored++
		}
	}
	switch {
	case !whole: // a commit makes all places visible, so none may be if one was not written
		_ = p.client.Commit(id, false) // the connection may have ended
	case stored > 0 && p.client.Commit(id, true) == nil:
		p.out.Stored += stored
	}
}

func (p *player) row(i int) []byte { return p.region.Bytes(int64(i)*p.RowBytes, p.RowBytes) }

// body returns the content of a row, which follows from its key.
func (p *player) body(k Key) []byte {
	sum := sha256.Sum256(k.Hash[:])
	return bytes.Repeat(sum[:], int(p.RowBytes)/len(sum)+1)[:p.RowBytes]
}

func playHash(prompt, row int) kv.Hash {
	b := binary.LittleEndian.AppendUint64(nil, uint64(prompt))
	return sha256.Sum256(binary.LittleEndian.AppendUint64(b, uint64(row)))
}
