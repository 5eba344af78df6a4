// SPDX-License-Identifier: Apache-2.0

// Command s3 is an object store in memory for interop: gofakes3 with one bucket. It prints
// its address and serves until its standard input ends, or with -addr until it is ended itself.
// With -ca it serves TLS, with a certificate of an authority whose own goes to that file. With -verify it compares signatures with
// those of Amazon's signer, and knows credentials that are good, end, have ended, or whose clock is wrong. With -gateway
// it runs versitygw over a directory instead.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
)

func main() {
	bucket := flag.String("bucket", "kvcache", "name of the bucket")
	ca := flag.String("ca", "", "serve TLS, and write the authority's certificate to this file")
	addr := flag.String("addr", "", "serve at this HOST:PORT; default a free port")
	check := flag.Bool("verify", false, "verify signatures")
	program := flag.String("gateway", "", "run this program, versitygw, over a directory of its own instead")
	flag.Parse()
	run := func() error { return serve(*bucket, *ca, *addr, *check) }
	if *program != "" {
		run = func() error { return gateway(*program, *bucket, *ca) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(bucket, ca, addr string, check bool) error {
	store := s3mem.New()
	if err := store.CreateBucket(bucket); err != nil {
		return err
	}
	l, err := net.Listen("tcp", cmp.Or(addr, "127.0.0.1:0"))
	if err != nil {
		return err
	}
	address := l.Addr()
	if ca != "" {
		if l, err = secure(l, ca); err != nil {
			return err
		}
	}
	h := gofakes3.New(store).Server()
	if check {
		h = verify(h)
	}
	fmt.Println(address)
	s := http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() {
		if addr != "" {
			return
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = s.Close()
	}()
	if err := s.Serve(l); err != http.ErrServerClosed {
		return err
	}
	return nil
}
