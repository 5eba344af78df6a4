// SPDX-License-Identifier: Apache-2.0

// Command forward is the floor of a proxy in Go: it passes requests and answers on unread, but for the lengths in
// their heads. It looks into no prompt, chooses no engine, and keeps a connection to an engine for each of a client.
//
//	forward --listen 127.0.0.1:8000 --to 127.0.0.1:9001 --to 127.0.0.1:9002
package main

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"io"
	"log"
	"net"
	"strconv"
	"strings"
)

type listFlag []string

func (l *listFlag) String() string     { return strings.Join(*l, ",") }
func (l *listFlag) Set(s string) error { *l = append(*l, s); return nil }

// head reads a head with its empty line, and returns the length of the body behind it, -1 for chunks.
func head(r *bufio.Reader, buf []byte) (_ []byte, length int64, err error) {
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return nil, 0, err
		}
		buf = append(buf, line...)
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok && len(bytes.TrimSpace(line)) == 0 {
			return buf, length, nil
		}
		switch value = bytes.TrimSpace(value); {
		case bytes.EqualFold(name, []byte("content-length")):
			if length, err = strconv.ParseInt(string(value), 10, 64); err != nil || length < 0 {
				return nil, 0, errors.New("bad Content-Length")
			}
		case bytes.EqualFold(name, []byte("transfer-encoding")):
			length = -1
		}
	}
}

// chunks passes a chunked body on, as much at once as has come.
func chunks(w *bufio.Writer, r *bufio.Reader) error {
	for {
		if r.Buffered() == 0 {
			if err := w.Flush(); err != nil {
				return err
			}
		}
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		size, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 16, 64)
		if err != nil || size < 0 {
			return errors.New("bad chunk")
		}
		if _, err := w.Write(line); err != nil {
			return err
		}
		if _, err := io.CopyN(w, r, size+2); err != nil {
			return err
		}
		if size == 0 {
			return nil
		}
	}
}

// body passes a body of known length on: what was read already, and the rest through memory, or with splice through none.
func body(w net.Conn, first []byte, r *bufio.Reader, from net.Conn, n int64, buf []byte, splice bool) error {
	k := min(n, int64(r.Buffered()))
	b, _ := r.Peek(int(k)) // it is there
	pieces := net.Buffers{first, b}
	if _, err := pieces.WriteTo(w); err != nil {
		return err
	}
	if _, err := r.Discard(int(k)); err != nil {
		return err
	}
	if n -= k; splice {
		_, err := io.CopyN(w, from, n)
		return err
	}
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, io.LimitReader(from, n), buf)
	return err
}

func serve(c net.Conn, to string, splice bool) error {
	defer c.Close()
	e, err := net.Dial("tcp", to)
	if err != nil {
		return err
	}
	defer e.Close()
	cr, er := bufio.NewReader(c), bufio.NewReader(e)
	buf, text := make([]byte, 256<<10), []byte(nil)
	for {
		h, n, err := head(cr, text[:0])
		if err != nil {
			return err
		}
		if n < 0 {
			return errors.New("a request in chunks")
		}
		if err := body(e, h, cr, c, n, buf, splice); err != nil {
			return err
		}
		if h, n, err = head(er, h[:0]); err != nil {
			return err
		}
		text = h
		w := bufio.NewWriter(c)
		_, _ = w.Write(h) // Flush returns its error
		if n < 0 {
			err = chunks(w, er)
		} else {
			_, err = io.CopyN(w, er, n)
		}
		if err = errors.Join(err, w.Flush()); err != nil {
			return err
		}
	}
}

func main() {
	var to listFlag
	flag.Var(&to, "to", "address of an engine (repeatable: connections take turns)")
	listen := flag.String("listen", "127.0.0.1:8000", "address to listen on")
	splice := flag.Bool("splice", false, "have the kernel move bodies from socket to socket, through no memory of this process")
	flag.Parse()
	l, err := net.Listen("tcp", *listen)
	if err != nil || len(to) == 0 {
		log.Fatal("--to is missing, or: ", err)
	}
	for i := 0; ; i++ {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			if err := serve(c, to[i%len(to)], *splice); !errors.Is(err, io.EOF) {
				log.Print(err)
			}
		}()
	}
}
