// SPDX-License-Identifier: Apache-2.0

// Command load is a closed-loop load generator for OpenAI-compatible servers: N connections, each with one request in flight.
//
// It speaks HTTP/1.1 over its own sockets (no client library between it and the figures), builds bodies without copying
// the prompt, checks every answer (status 200, the request's own checksum word echoed by the engine, [DONE] at the end of
// a stream) and reads the CPU time and memory of the process trees in its flags from /proc.
//
//	load --url http://127.0.0.1:8000 --conns 16 --size 16KiB --stream --duration 3s --pid router=1234
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"log"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

type listFlag []string

func (l *listFlag) String() string     { return strings.Join(*l, ",") }
func (l *listFlag) Set(s string) error { *l = append(*l, s); return nil }

const clockTick = 100 // USER_HZ, fixed on Linux

type usage struct {
	CPU   float64 // seconds, user and system
	RSS   int64   // bytes now
	Peak  int64   // bytes, high-water mark summed over the processes
	Procs int
}

// tree sums CPU time and memory of root and all its descendants.
func tree(root int) usage {
	parent, cpu := map[int]int{}, map[int]float64{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		raw, err := os.ReadFile(d + "/stat")
		if err != nil {
			continue
		}
		i := bytes.LastIndexByte(raw, ')')
		f := strings.Fields(string(raw[i+1:]))
		if i < 0 || len(f) < 15 {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(d))
		parent[pid], _ = strconv.Atoi(f[1])
		for _, k := range f[11:15] { // utime stime cutime cstime
			v, _ := strconv.ParseFloat(k, 64)
			cpu[pid] += v / clockTick
		}
	}
	var u usage
	for pid := range parent {
		p, hops := pid, 0
		for p != root && p > 1 && hops < 64 {
			p, hops = parent[p], hops+1
		}
		if p != root {
			continue
		}
		u.Procs++
		u.CPU += cpu[pid]
		raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		for line := range strings.Lines(string(raw)) {
			f := strings.Fields(line)
			if len(f) >= 2 && (f[0] == "VmRSS:" || f[0] == "VmHWM:") {
				kb, _ := strconv.ParseInt(f[1], 10, 64)
				if f[0] == "VmRSS:" {
					u.RSS += kb << 10
				} else {
					u.Peak += kb << 10
				}
			}
		}
	}
	return u
}

func selfCPU() float64 {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return float64(r.Utime.Sec+r.Stime.Sec) + float64(r.Utime.Usec+r.Stime.Usec)/1e6
}

func parseSize(s string) (int, error) {
	mul := 1
	for suffix, m := range map[string]int{"KiB": 1 << 10, "MiB": 1 << 20} {
		if t, ok := strings.CutSuffix(s, suffix); ok {
			s, mul = t, m
		}
	}
	n, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil || n < 1 || n > 32<<20 || n*mul < 64 || n*mul > 32<<20 {
		return 0, fmt.Errorf("size %q: want 64 bytes to 32MiB, e.g. 2KiB", s)
	}
	return n * mul, nil
}

// corpus makes prompts. distinct: the first byte already differs; shared: one of hot common prefixes, then a tail of its own.
type corpus struct {
	size, hot int
	share     float64
	pool      []byte
	n         atomic.Uint64
	salt      uint64
}

func newCorpus(kind string, size, hot int, share float64, seed uint64) (*corpus, error) {
	c := &corpus{size: size, salt: seed}
	switch kind {
	case "distinct":
	case "shared":
		c.hot, c.share = hot, share
	default:
		return nil, fmt.Errorf("corpus %q: want distinct or shared", kind)
	}
	r := rand.New(rand.NewPCG(seed, 7))
	words := make([]string, 2000)
	for i := range words {
		w := make([]byte, 2+r.IntN(9))
		for j := range w {
			w[j] = byte('a' + r.IntN(26))
		}
		words[i] = string(w)
	}
	for len(c.pool) < 4<<20+size {
		c.pool = append(append(c.pool, words[r.IntN(len(words))]...), ' ')
	}
	return c, nil
}

// next returns the prompt in pieces and a checksum of the whole.
func (c *corpus) next() ([][]byte, uint32) {
	i := c.n.Add(1)
	h := (i ^ c.salt) * 0x9e3779b97f4a7c15
	id := []byte(fmt.Sprintf("%016x%08x ", h, i))
	off := int(h>>8) % (4 << 20)
	if off < 0 {
		off += 4 << 20
	}
	var parts [][]byte
	if c.hot > 0 {
		k, n := int(h>>3)%c.hot, int(float64(c.size)*c.share)
		if k < 0 {
			k += c.hot
		}
		start := k * (4 << 20) / c.hot
		parts = [][]byte{c.pool[start : start+n], id, c.pool[off : off+max(0, c.size-n-len(id))]}
	} else {
		parts = [][]byte{id, c.pool[off : off+c.size-len(id)]}
	}
	var sum uint32
	for _, p := range parts {
		sum = crc32.Update(sum, crc32.IEEETable, p)
	}
	return parts, sum
}

type sample struct {
	ttft, total time.Duration
	end         time.Time
}

type worker struct {
	addr, host string
	chat       bool
	stream     bool
	tokens     int
	model      string
	timeout    time.Duration
	c          *corpus

	conn    net.Conn
	r       *bufio.Reader
	samples []sample
	errs    map[string]int
	redials int
	bytes   int64
	scratch []byte
}

var errClosed = errors.New("connection closed by server")

// body reads one response body, calling seen at its first byte.
func (w *worker) body(length int64, chunked bool, seen func()) error {
	w.scratch = w.scratch[:0]
	read := func(n int64) error {
		for n > 0 {
			k := min(n, 32<<10)
			at := len(w.scratch)
			w.scratch = slices.Grow(w.scratch, int(k))[:at+int(k)]
			m, err := w.r.Read(w.scratch[at:])
			w.scratch = w.scratch[:at+m]
			if m > 0 {
				seen()
			}
			n -= int64(m)
			if err != nil {
				return err
			}
		}
		return nil
	}
	if !chunked {
		return read(length)
	}
	for {
		line, err := w.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		size, err := strconv.ParseInt(string(bytes.TrimSpace(bytes.SplitN(line, []byte(";"), 2)[0])), 16, 64)
		if err != nil || size < 0 || size > 64<<20 {
			return fmt.Errorf("bad chunk size %q", line)
		}
		if err := read(size); err != nil {
			return err
		}
		if _, err := w.r.Discard(2); err != nil {
			return err
		}
		if size == 0 {
			return nil
		}
	}
}

// once sends a request and reads its answer. Its times count from due, or from its beginning where due is zero.
func (w *worker) once(due time.Time) (s sample, err error) {
	if w.conn == nil {
		if w.conn, err = net.DialTimeout("tcp", w.addr, 5*time.Second); err != nil {
			return s, errors.New("dial failed")
		}
		w.r = bufio.NewReaderSize(w.conn, 64<<10)
		w.redials++
	}
	keep := false
	defer func() {
		if !keep {
			w.conn.Close()
			w.conn = nil
		}
	}()
	parts, sum := w.c.next()
	word := fmt.Sprintf("crc:%08x", sum)
	open, end, path := `,"prompt":"`, `"`, "/v1/completions"
	if w.chat {
		open, end, path = `,"messages":[{"role":"user","content":"`, `"}]`, "/v1/chat/completions"
	}
	head := `{"model":"` + w.model + `","user":"` + word + `"` + open
	tail := end + `,"max_tokens":` + strconv.Itoa(w.tokens) + `,"temperature":0,"stream":` + strconv.FormatBool(w.stream) + `}`
	n := len(head) + len(tail)
	for _, p := range parts {
		n += len(p)
	}
	req := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nAccept: */*\r\nContent-Length: %d\r\n\r\n%s", path, w.host, n, head)
	bufs := net.Buffers{[]byte(req)}
	bufs = append(append(bufs, parts...), []byte(tail))
	start := time.Now()
	_ = w.conn.SetDeadline(start.Add(w.timeout))
	if !due.IsZero() {
		start = due
	}
	if _, err = bufs.WriteTo(w.conn); err != nil {
		return s, fmt.Errorf("write: %w", errClosed)
	}
	status := 0
	length, chunked, close := int64(0), false, false
	for first := true; ; first = false {
		line, err := w.r.ReadSlice('\n')
		if err != nil {
			if os.IsTimeout(err) {
				return s, errors.New("timeout")
			}
			return s, errClosed
		}
		line = bytes.TrimSpace(line)
		if first {
			f := bytes.Fields(line)
			if len(f) < 2 {
				return s, errors.New("bad status line")
			}
			status, _ = strconv.Atoi(string(f[1]))
			continue
		}
		if len(line) == 0 {
			break
		}
		k, v, _ := bytes.Cut(line, []byte(":"))
		v = bytes.TrimSpace(v)
		switch {
		case bytes.EqualFold(k, []byte("content-length")):
			length, _ = strconv.ParseInt(string(v), 10, 64)
		case bytes.EqualFold(k, []byte("transfer-encoding")):
			chunked = bytes.EqualFold(v, []byte("chunked"))
		case bytes.EqualFold(k, []byte("connection")):
			close = bytes.EqualFold(v, []byte("close"))
		}
	}
	err = w.body(length, chunked, func() {
		if s.ttft == 0 {
			s.ttft = time.Since(start)
		}
	})
	s.end = time.Now()
	s.total = s.end.Sub(start)
	w.bytes += int64(len(w.scratch))
	switch {
	case err != nil:
		return s, errors.New("body cut short")
	case status != 200:
		keep = !close
		return s, fmt.Errorf("status %d: %.120s", status, w.scratch)
	case !bytes.Contains(w.scratch, []byte(word)):
		return s, errors.New("answer of another request, or an empty one")
	case w.stream && !bytes.HasSuffix(bytes.TrimSpace(w.scratch), []byte("data: [DONE]")):
		return s, errors.New("stream without [DONE]")
	case w.stream && bytes.Count(w.scratch, []byte("data: {")) < w.tokens:
		return s, errors.New("stream with too few events")
	}
	keep = !close
	return s, nil
}

func ms(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

func quantiles(v []time.Duration) map[string]float64 {
	if len(v) == 0 {
		return nil
	}
	slices.Sort(v)
	at := func(q float64) float64 { return ms(v[min(len(v)-1, int(q*float64(len(v))))]) }
	var sum time.Duration
	for _, d := range v {
		sum += d
	}
	return map[string]float64{"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ms(v[len(v)-1]), "mean": ms(sum / time.Duration(len(v)))}
}

func main() {
	var urls, pids listFlag
	flag.Var(&urls, "url", "base URL, e.g. http://127.0.0.1:8000 (repeatable: connections take turns)")
	flag.Var(&pids, "pid", "name=PID of a process tree to account (repeatable)")
	conns := flag.Int("conns", 1, "connections, one request in flight on each")
	rate := flag.Float64("rate", 0, "requests per second that are due, evenly; times count from then, also while no connection is free (0 = each connection sends its next at once)")
	size := flag.String("size", "2KiB", "prompt size")
	kind := flag.String("corpus", "distinct", "distinct, or shared (--hot common prefixes of --share of the prompt)")
	hot := flag.Int("hot", 8, "number of common prefixes of the shared corpus")
	share := flag.Float64("share", 0.9, "length of the common prefix as a share of the prompt")
	stream := flag.Bool("stream", false, "ask for SSE")
	chat := flag.Bool("chat", false, "use /v1/chat/completions")
	tokens := flag.Int("max-tokens", 16, "tokens to ask for")
	model := flag.String("model", "mock", "model name")
	dur := flag.Duration("duration", 3*time.Second, "measured time")
	warm := flag.Duration("warmup", 300*time.Millisecond, "time before measuring")
	longest := flag.Duration("max-duration", 10*time.Second, "measured time at most, while --min-per-conn is not reached")
	least := flag.Int("min-per-conn", 4, "go on past --duration until each connection has had this many requests on average")
	maxReq := flag.Int("requests", 0, "stop after this many measured requests (0 = by duration only)")
	timeout := flag.Duration("timeout", 30*time.Second, "per request")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "prompts differ between seeds")
	flag.Parse()
	n, err := parseSize(*size)
	if err != nil || len(urls) == 0 || *conns < 1 || *share < 0 || *share > 0.99 || *tokens < 1 || *hot < 1 || *rate < 0 {
		fmt.Fprintln(os.Stderr, "bad arguments:", err)
		flag.Usage()
		os.Exit(2)
	}
	c, err := newCorpus(*kind, n, *hot, *share, *seed)
	if err != nil {
		log.Fatal(err)
	}
	trees := map[string]int{}
	for _, p := range pids {
		name, v, ok := strings.Cut(p, "=")
		pid, err := strconv.Atoi(v)
		if !ok || err != nil {
			log.Fatalf("--pid %q: want name=PID", p)
		}
		trees[name] = pid
	}
	workers := make([]*worker, *conns)
	// A request counts if it ends inside the window, whenever it started: what leaves at one edge is made up at the other, so a slow
	// server is not charged for requests that are never counted. CPU is read at both edges, not after the last requests have drained.
	var stop atomic.Bool
	var count, sent atomic.Int64
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range workers {
		u, err := url.Parse(urls[i%len(urls)])
		if err != nil || u.Host == "" {
			log.Fatalf("bad --url %q", urls[i%len(urls)])
		}
		w := &worker{addr: u.Host, host: u.Host, chat: *chat, stream: *stream, tokens: *tokens, model: *model, timeout: *timeout, c: c, errs: map[string]int{}}
		workers[i] = w
		wg.Add(1)
		go func() {
			defer wg.Done()
			for !stop.Load() {
				var due time.Time
				if *rate > 0 {
					due = begin.Add(time.Duration(float64(sent.Add(1)) / *rate * 1e9))
					for d := time.Until(due); d > 0 && !stop.Load(); d = time.Until(due) {
						time.Sleep(min(d, 100*time.Millisecond))
					}
					if stop.Load() {
						return
					}
				}
				s, err := w.once(due)
				if err != nil {
					w.errs[err.Error()]++
					time.Sleep(10 * time.Millisecond) // a refusing server must not turn the loop into a spin
					continue
				}
				w.samples = append(w.samples, s)
				count.Add(1)
			}
		}()
	}
	time.Sleep(*warm)
	before := map[string]usage{}
	for k, p := range trees {
		before[k] = tree(p)
	}
	self0, t0, n0 := selfCPU(), time.Now(), count.Load()
	for {
		time.Sleep(5 * time.Millisecond)
		d, k := time.Since(t0), count.Load()-n0
		if d >= *longest || (d >= *dur && (*rate > 0 || k >= int64(*least)*int64(*conns))) || (*maxReq > 0 && k >= int64(*maxReq)) {
			break
		}
	}
	t1 := time.Now()
	wall := t1.Sub(t0)
	after := map[string]usage{}
	for k, p := range trees {
		after[k] = tree(p)
	}
	self1 := selfCPU()
	stop.Store(true)
	wg.Wait()
	var ttft, total []time.Duration
	errs, redials, failed := map[string]int{}, 0, 0
	var out int64
	for _, w := range workers {
		for _, s := range w.samples {
			if s.end.Before(t0) || s.end.After(t1) {
				continue
			}
			ttft, total = append(ttft, s.ttft), append(total, s.total)
		}
		for k, v := range w.errs {
			errs[k] += v
			failed += v
		}
		redials += w.redials
		out += w.bytes
		if w.conn != nil {
			w.conn.Close()
		}
	}
	done := len(total)
	res := map[string]any{
		"conns": *conns, "rate": *rate, "size": n, "corpus": *kind, "stream": *stream, "chat": *chat, "max_tokens": *tokens, "requests": done,
		"failed": failed, "errors": errs, "dials": redials, "wall_s": wall.Seconds(), "rps": float64(done) / wall.Seconds(),
		"ttft_ms": quantiles(ttft), "total_ms": quantiles(total), "answer_bytes": out,
	}
	// CPU between the two readings covers the failed requests too; per 1000 successful ones is what a user pays.
	proc := map[string]any{}
	for k := range trees {
		u := after[k]
		d := u.CPU - before[k].CPU
		e := map[string]any{"cpu_s": d, "rss_bytes": u.RSS, "peak_rss_bytes": u.Peak, "processes": u.Procs, "cores": d / wall.Seconds()}
		if done > 0 {
			e["cpu_s_per_1000"] = d / float64(done) * 1000
		}
		proc[k] = e
	}
	self := map[string]any{"cpu_s": self1 - self0, "cores": (self1 - self0) / wall.Seconds()}
	if done > 0 {
		self["cpu_s_per_1000"] = (self1 - self0) / float64(done) * 1000
	}
	proc["load"] = self
	res["processes"] = proc
	enc := json.NewEncoder(os.Stdout)
	enc.SetIndent("", " ")
	if err := enc.Encode(res); err != nil {
		log.Fatal(err)
	}
	if done == 0 {
		os.Exit(1)
	}
}
