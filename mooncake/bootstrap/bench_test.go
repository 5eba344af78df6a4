package bootstrap

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// The benchmarks named Server measure another process, ours or vLLM's:
//
//	KVASIR_BOOTSTRAP_SERVER=127.0.0.1:8998,PID go test -run - -bench Server ./mooncake/bootstrap
//
// interop/mooncake/bench_bootstrap.py starts both and compares them.

type external struct {
	addr string
	pid  int
}

func externalServer(b *testing.B) external {
	b.Helper()
	addr, pid, ok := strings.Cut(os.Getenv("KVASIR_BOOTSTRAP_SERVER"), ",")
	n, err := strconv.Atoi(pid)
	if !ok || err != nil {
		b.Skip("KVASIR_BOOTSTRAP_SERVER names no HOST:PORT,PID")
	}
	return external{addr, n}
}

// cpu returns the user and system time that the server has used.
func (x external) cpu(b *testing.B) time.Duration {
	b.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", x.pid))
	if err != nil {
		b.Fatal(err)
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	if err1 != nil || err2 != nil {
		b.Fatal(fields)
	}
	return time.Duration(user+system) * 10 * time.Millisecond // 100 ticks a second on Linux
}

// conn speaks HTTP/1.1 with as little work as possible.
type conn struct {
	net.Conn
	r *bufio.Reader
}

func dial(addr string) (*conn, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &conn{c, bufio.NewReaderSize(c, 1<<16)}, nil
}

// do sends a request and reads its answer.
func (c *conn) do(request []byte) (status int, body []byte, _ error) {
	if _, err := c.Write(request); err != nil {
		return 0, nil, err
	}
	length := 0
	for first := true; ; first = false {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return 0, nil, err
		}
		if first {
			status, _ = strconv.Atoi(string(line[9:12]))
		}
		if len(line) == 2 {
			break
		}
		if len(line) > 16 && strings.EqualFold(string(line[:15]), "content-length:") {
			length, _ = strconv.Atoi(string(bytes.TrimSpace(line[15:])))
		}
	}
	body = make([]byte, length)
	_, err := io.ReadFull(c.r, body)
	return status, body, err
}

func getRequest(path string) []byte {
	return []byte("GET " + path + " HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\n\r\n")
}

func registerRequest(b *testing.B, in Registration) []byte {
	b.Helper()
	body, err := in.body()
	if err != nil {
		b.Fatal(err)
	}
	return append(fmt.Appendf(nil, "POST /register HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nUser-Agent: python-httpx/0.28.1\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n", len(body)), body...)
}

// mustDo makes one request that must be answered 200.
func mustDo(b *testing.B, c *conn, request []byte) []byte {
	status, body, err := c.do(request)
	if err != nil || status != 200 {
		b.Errorf("status %d, %v: %.300s", status, err, body)
	}
	return body
}

// BenchmarkServerQuery asks for a directory of 8 workers, over one connection and
// over a new one each time, as D does.
func BenchmarkServerQuery(b *testing.B) {
	x := externalServer(b)
	c, err := dial(x.addr)
	if err != nil {
		b.Fatal(err)
	}
	for tp := range 8 {
		mustDo(b, c, registerRequest(b, Registration{EngineID: "1f0e1c52-3f0c-4a6e-9c5c-2f6f1f6e8d11", TPRank: tp, Addr: fmt.Sprintf("tcp://10.0.0.7:4123%d", tp)}))
	}
	c.Close()
	query := getRequest("/query")
	if c, err = dial(x.addr); err != nil { // who asks is not who registers
		b.Fatal(err)
	}
	defer c.Close()
	run := func(b *testing.B, one func()) {
		before, n := x.cpu(b), 0
		for b.Loop() {
			one()
			n++
		}
		b.ReportMetric(float64(n)/(x.cpu(b)-before).Seconds(), "queries/cpu-s")
	}
	b.Run("connection=kept", func(b *testing.B) { run(b, func() { mustDo(b, c, query) }) })
	b.Run("connections=32", func(b *testing.B) {
		conns := make(chan *conn, 32)
		for range cap(conns) {
			c, err := dial(x.addr)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			conns <- c
		}
		b.SetParallelism(cap(conns)) // times GOMAXPROCS
		before := x.cpu(b)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				c := <-conns
				mustDo(b, c, query)
				conns <- c
			}
		})
		b.ReportMetric(float64(b.N)/(x.cpu(b)-before).Seconds(), "queries/cpu-s")
	})
	b.Run("connection=new", func(b *testing.B) {
		run(b, func() {
			c, err := dial(x.addr)
			if err != nil {
				b.Fatal(err)
			}
			mustDo(b, c, query)
			c.Close()
		})
	})
}

// BenchmarkServerWorkers has a thousand workers, each with a connection. In a
// burst all register in the same instant; paced, each registers once a second
// while four others query 200 times a second in all, and a fifth asks an echo in
// this process: the floor.
func BenchmarkServerWorkers(b *testing.B) {
	x := externalServer(b)
	const workers = 1000
	conns := make([]*conn, workers)
	for i := range conns {
		c, err := dial(x.addr)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		conns[i] = c
	}
	var engines atomic.Int64
	engines.Store(time.Now().UnixMilli())
	b.Run("burst", func(b *testing.B) {
		var took []time.Duration
		for b.Loop() {
			took = append(took, burst(b, conns, int(engines.Add(1)))...)
		}
		report(b, "register", took)
	})
	b.Run("paced", func(b *testing.B) {
		dp := int(engines.Add(1))
		echo := startEcho(b)
		var registers, queries, floor []time.Duration
		for b.Loop() {
			var wg sync.WaitGroup
			wg.Go(func() { floor = append(floor, ask(b, echo)...) })
			r, q := paced(b, x.addr, conns, dp)
			registers, queries = append(registers, r...), append(queries, q...)
			wg.Wait()
		}
		report(b, "register", registers)
		report(b, "query", queries)
		report(b, "floor", floor)
	})
}

func workerRequest(b *testing.B, dp, i int) []byte {
	return registerRequest(b, Registration{EngineID: "1f0e1c52-3f0c-4a6e-9c5c-2f6f1f6e8d11", DPRank: dp, TPRank: i, Addr: fmt.Sprintf("tcp://10.0.0.7:%d", 10000+i)})
}

func burst(b *testing.B, conns []*conn, dp int) []time.Duration {
	took := make([]time.Duration, len(conns))
	begin := make(chan struct{})
	var wg sync.WaitGroup
	for i, c := range conns {
		request := workerRequest(b, dp, i)
		wg.Go(func() {
			<-begin
			start := time.Now()
			mustDo(b, c, request)
			took[i] = time.Since(start)
		})
	}
	close(begin)
	wg.Wait()
	return took
}

func paced(b *testing.B, addr string, conns []*conn, dp int) (registers, queries []time.Duration) {
	registers = make([]time.Duration, len(conns))
	var wg sync.WaitGroup
	for i, c := range conns {
		request := workerRequest(b, dp, i)
		wait := time.Duration(rand.Int64N(int64(time.Second)))
		wg.Go(func() {
			time.Sleep(wait)
			start := time.Now()
			mustDo(b, c, request)
			registers[i] = time.Since(start)
		})
	}
	const askers = 4
	asked := make([][]time.Duration, askers)
	for i := range askers {
		wg.Go(func() { asked[i] = ask(b, addr) })
	}
	wg.Wait()
	return registers, slices.Concat(asked...)
}

// ask queries 50 times in a second.
func ask(b *testing.B, addr string) (took []time.Duration) {
	c, err := dial(addr)
	if err != nil {
		b.Error(err)
		return nil
	}
	defer c.Close()
	const each = 50
	for range each {
		time.Sleep(time.Second / each)
		start := time.Now()
		mustDo(b, c, getRequest("/query"))
		took = append(took, time.Since(start))
	}
	return took
}

// startEcho listens in this process and answers at once: what it takes is the
// machine's and the driver's share of the times above.
func startEcho(b *testing.B) (addr string) {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 4096)
				for {
					if _, err := c.Read(buf); err != nil {
						return
					}
					if _, err := c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func report(b *testing.B, what string, took []time.Duration) {
	slices.Sort(took)
	for name, at := range map[string]int{"p50": len(took) / 2, "p99": len(took) * 99 / 100, "max": len(took) - 1} {
		b.ReportMetric(float64(took[at].Microseconds())/1000, what+"-"+name+"-ms")
	}
}

// BenchmarkQuery and BenchmarkRegister are the handler alone.
func BenchmarkQuery(b *testing.B) {
	for _, workers := range []int{8, 1000} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			r := open(b, Options{})
			for tp := range workers {
				if err := r.Register(b.Context(), Registration{EngineID: "e", TPRank: tp, Addr: "tcp://10.0.0.7:41233"}, false); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if r.current() == nil {
					b.Fatal("no directory")
				}
			}
		})
	}
}

func BenchmarkDecodeRegistration(b *testing.B) {
	body, err := Registration{EngineID: "1f0e1c52-3f0c-4a6e-9c5c-2f6f1f6e8d11", TPRank: 3, Addr: "tcp://10.0.0.7:41233"}.body()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, _, ok := decodeRegistration("application/json", body); !ok {
			b.Fatal("refused")
		}
	}
}
