// SPDX-License-Identifier: Apache-2.0

// Command plain moves values to and from a Redis, or from a bucket, and does nothing else: what a
// tier is measured against. Names come on standard input, one a line.
//
//	plain redis HOST:PORT get|set CONNECTIONS BYTES
//	plain s3 URL get CONNECTIONS BYTES
//
// Each value has memory of its own, which is touched before the time begins. Each connection has one
// command at a time: a Redis that is asked for more copies all its answers into memory of its own before
// it sends the first, which takes several times as long. It prints the seconds that it took, and those of
// its processor time.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// part is what one connection moves.
type part struct {
	names  []string
	values [][]byte
}

func run(args []string) error {
	if len(args) != 5 {
		return errors.New("usage: plain redis|s3 WHERE get|set CONNECTIONS BYTES <NAMES")
	}
	conns, err1 := strconv.Atoi(args[3])
	size, err2 := strconv.Atoi(args[4])
	if err := errors.Join(err1, err2); err != nil || conns < 1 || size < 1 {
		return fmt.Errorf("connections and bytes: %w", err)
	}
	parts, n := make([]part, conns), 0
	lines := bufio.NewScanner(os.Stdin)
	for ; lines.Scan(); n++ {
		p, v := &parts[n%conns], make([]byte, size)
		for i := range v {
			v[i] = byte(i * (n + 1))
		}
		p.names, p.values = append(p.names, lines.Text()), append(p.values, v)
	}
	var moves []func() error
	for _, p := range parts {
		var move func() error
		var err error
		switch args[0] + " " + args[2] {
		case "redis get", "redis set":
			move, err = redis(args[1], args[2], p)
		case "s3 get":
			move = s3(args[1], p)
		default:
			err = fmt.Errorf("no way to %s of %s", args[2], args[0])
		}
		if err != nil {
			return err
		}
		moves = append(moves, move)
	}
	errs := make([]error, conns)
	var wg sync.WaitGroup
	began, used := time.Now(), cpu()
	for i, move := range moves {
		wg.Go(func() { errs[i] = move() })
	}
	wg.Wait()
	took := time.Since(began)
	used = cpu() - used
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err := fmt.Println(took.Seconds(), used.Seconds())
	return err
}

// cpu is the processor time of this process.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// redis returns what moves a part over a connection of its own, which is open.
func redis(addr, verb string, p part) (func() error, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(c, 16<<10)
	line := func(want string) error {
		got, err := r.ReadString('\n')
		if err == nil && got != want {
			err = fmt.Errorf("%.60q where %q was to come", got, want)
		}
		return err
	}
	get := func(name string, v []byte) error {
		if _, err := fmt.Fprintf(c, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(name), name); err != nil {
			return err
		}
		if err := line(fmt.Sprintf("$%d\r\n", len(v))); err != nil {
			return err
		}
		if _, err := io.ReadFull(r, v); err != nil {
			return err
		}
		return line("\r\n")
	}
	set := func(name string, v []byte) error {
		b := net.Buffers{fmt.Appendf(nil, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n", len(name), name, len(v)), v, []byte("\r\n")}
		if _, err := b.WriteTo(c); err != nil {
			return err
		}
		return line("+OK\r\n")
	}
	move := set
	if verb == "get" {
		move = get
	}
	return func() error {
		for i, name := range p.names {
			if err := move(name, p.values[i]); err != nil {
				return err
			}
		}
		return c.Close()
	}, nil
}

// s3 returns what gets a part, over connections that net/http keeps.
func s3(base string, p part) func() error {
	client := &http.Client{Transport: &http.Transport{DisableCompression: true}}
	return func() error {
		defer client.CloseIdleConnections()
		for i, name := range p.names {
			a, err := client.Get(base + "/" + url.PathEscape(name))
			if err != nil {
				return err
			}
			_, err = io.ReadFull(a.Body, p.values[i])
			a.Body.Close()
			if err != nil || a.ContentLength != int64(len(p.values[i])) {
				return fmt.Errorf("%s: %s, %d bytes: %w", name, a.Status, a.ContentLength, err)
			}
		}
		return nil
	}
}
