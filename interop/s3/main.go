// Command s3 is an object store in memory for interop: gofakes3 with one bucket. It prints
// its address and serves until its standard input ends.
package main

import (
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
	flag.Parse()
	if err := serve(*bucket); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(bucket string) error {
	store := s3mem.New()
	if err := store.CreateBucket(bucket); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	s := http.Server{Handler: gofakes3.New(store).Server(), ReadHeaderTimeout: time.Minute}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = s.Close()
	}()
	if err := s.Serve(l); err != http.ErrServerClosed {
		return err
	}
	return nil
}
