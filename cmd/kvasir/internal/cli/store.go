// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// storeCmd reads and changes a Mooncake Store.
type storeCmd struct {
	Ls  storeLsCmd  `cmd:"" help:"Show which of these keys exist, their lengths and places."`
	Get storeGetCmd `cmd:"" help:"Write an object to standard output."`
	Put storePutCmd `cmd:"" help:"Put standard input as an object."`
	Rm  storeRmCmd  `cmd:"" help:"Remove objects."`
}

// Help returns the text that kvasir store --help shows. It implements kong's detailed help.
func (storeCmd) Help() string {
	return `Works with a running mooncake_master of 0.3.7, 0.3.11, 0.3.12, 0.3.13 or 0.3.14, over TCP.

Examples:
  kvasir store put greeting --master 127.0.0.1:50051 < FILE
  kvasir store ls greeting --master 127.0.0.1:50051
  kvasir store ls --like hicache --model MODEL --page 64 --tokens PROMPT.json --master 127.0.0.1:50051
  kvasir store get greeting --master 127.0.0.1:50051 > COPY
  kvasir store rm greeting --force --master 127.0.0.1:50051`
}

// cluster has the flags that the commands of kvasir store share: which cluster they use.
type cluster struct {
	masterFlags
	peerFlags
	Timeout time.Duration `help:"Time for the whole." default:"60s"`
}

// open returns a master, a client, a context that ends after the timeout, and a function that closes them.
func (c *cluster) open(e *env, o store.ClientOptions) (context.Context, *store.Master, *store.Client, func(), error) {
	var f faults
	c.faults(&f)
	f.unless(c.Timeout > 0, "--timeout %v is not above 0", c.Timeout)
	if err := f.err(); err != nil {
		return nil, nil, nil, nil, err
	}
	secrets, err := c.peerFlags.open(e.log)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	m, err := store.NewMaster(c.options())
	if err != nil {
		return nil, nil, nil, nil, err
	}
	ctx, cancel := context.WithTimeout(e.ctx, c.Timeout)
	te := transfer.New(transfer.Options{Secrets: secrets})
	return ctx, m, store.NewClient(m, te, o), func() {
		cancel()
		te.Close()
		m.Close()
	}, nil
}

type storeLsCmd struct {
	cluster
	hicacheFlags
	Keys []string `arg:"" optional:"" name:"key" help:"Keys."`
}

// Run asks the master about the keys and prints the answers.
func (c *storeLsCmd) Run(e *env) error {
	if err := c.hicacheFlags.check(len(c.Keys)); err != nil {
		return err
	}
	ctx, m, _, end, err := c.open(e, store.ClientOptions{})
	if err != nil {
		return err
	}
	defer end()
	if c.Tokens != "" {
		return c.pages(ctx, e, m)
	}
	found, err := m.Replicas(ctx, c.Keys)
	if err != nil {
		return err
	}
	missing := 0
	for i, f := range found {
		if c.Like != "" {
			fmt.Fprintln(e.stdout, explainHiCache(c.Keys[i]))
		}
		if f.Err != nil {
			fmt.Fprintf(e.stdout, "%s: %v\n", printable(c.Keys[i]), f.Err)
			missing++
			continue
		}
		for _, r := range f.Replicas {
			what := "complete"
			if !r.Complete {
				what = "being written"
			}
			if len(r.Pieces) == 0 {
				fmt.Fprintf(e.stdout, "%s: a replica that TCP does not reach (kind %d), %s\n", printable(c.Keys[i]), r.Kind, what)
				continue
			}
			fmt.Fprintf(e.stdout, "%s: %d bytes at %s, %s, leased for %v\n", printable(c.Keys[i]), r.Bytes(), printable(r.Pieces[0].Endpoint), what, f.Lease)
		}
	}
	if missing > 0 {
		return fmt.Errorf("%d of %d keys are not in the store", missing, len(c.Keys))
	}
	return nil
}

type storeGetCmd struct {
	cluster
	Key string `arg:"" help:"Key."`
}

// maxObject is the largest object that kvasir store gets or puts, in bytes, because the command holds it in memory. For a larger one the
// command ends with an error.
const maxObject = 4 << 30

// Run reads an object and writes it to standard output.
func (c *storeGetCmd) Run(e *env) error {
	ctx, m, client, end, err := c.open(e, store.ClientOptions{})
	if err != nil {
		return err
	}
	defer end()
	found, err := m.Replicas(ctx, []string{c.Key})
	if err != nil {
		return err
	}
	if found[0].Err != nil {
		return found[0].Err
	}
	for _, r := range found[0].Replicas {
		if n := r.Bytes(); n > 0 && n <= maxObject {
			b := make([]byte, n)
			if err := client.Get(ctx, []store.Object{{Key: c.Key, Parts: [][]byte{b}}})[0]; err != nil {
				return err
			}
			_, err := e.stdout.Write(b)
			return err
		}
	}
	return store.ErrUnreadable
}

type storePutCmd struct {
	cluster
	Key      string `arg:"" help:"Key."`
	Replicas int    `help:"Copies, on different nodes." default:"1"`
	Segment  string `help:"Name of the segment that is preferred." placeholder:"NAME"`
}

// Run puts standard input as an object.
func (c *storePutCmd) Run(e *env) error {
	if c.Replicas < 1 || c.Replicas > 64 {
		return usagef("--replicas %d is outside 1 to 64", c.Replicas)
	}
	ctx, m, client, end, err := c.open(e, store.ClientOptions{Put: store.PutOptions{Replicas: c.Replicas, Segment: c.Segment}})
	if err != nil {
		return err
	}
	defer end()
	b, err := readAll(ctx, io.LimitReader(os.Stdin, maxObject+1))
	switch {
	case err != nil:
		return err
	case len(b) == 0:
		return errors.New("standard input is empty: an object has at least one byte")
	case len(b) > maxObject:
		return fmt.Errorf("standard input has more than %d bytes", maxObject)
	}
	if err := client.Put(ctx, []store.Object{{Key: c.Key, Parts: [][]byte{b}}})[0]; err != nil {
		return err
	}
	if client.Stats().Existed > 0 {
		fmt.Fprintf(e.stderr, "%s exists already, it is left as it is\n", printable(c.Key))
		return nil
	}
	by := ""
	if v, err := m.Version(ctx); err == nil { // otherwise the object is still put
		by = fmt.Sprintf(", by the calls of Mooncake %v", v)
	}
	fmt.Fprintf(e.stderr, "%d bytes are put%s\n", len(b), by)
	return nil
}

// readAll reads r to its end, or until ctx ends; in that case a read of r goes on until the process ends.
func readAll(ctx context.Context, r io.Reader) ([]byte, error) {
	var b []byte
	done := make(chan error, 1)
	go func() {
		var err error
		b, err = io.ReadAll(r)
		done <- err
	}()
	select {
	case err := <-done:
		return b, err
	case <-ctx.Done():
		return nil, fmt.Errorf("standard input has not ended: %w", ctx.Err())
	}
}

type storeRmCmd struct {
	cluster
	Keys  []string `arg:"" name:"key" help:"Keys."`
	Force bool     `help:"Leased objects, too."`
}

// Run removes objects.
func (c *storeRmCmd) Run(e *env) error {
	ctx, m, _, end, err := c.open(e, store.ClientOptions{})
	if err != nil {
		return err
	}
	defer end()
	var errs []error
	for _, k := range c.Keys {
		if err := m.Remove(ctx, k, c.Force); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", printable(k), err))
		}
	}
	return errors.Join(errs...)
}
