// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
)

// streams answers requests with two tokens each, up to request number last. A later one calls held
// and waits.
func streams(t *testing.T, last int64, held func()) string {
	t.Helper()
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // then the server notices when the client leaves
		if r.URL.Path != "/v1/completions" {
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			return
		}
		if n.Add(1) > last {
			held()
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// After SIGINT in the middle of a run, the table and the file have the requests that ended, and the last
// line says how far it came.
func TestBenchInterrupted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.json")
	at := make(chan struct{}, 1)
	c := command("bench", "--base-url", streams(t, 3, func() { at <- struct{}{} }), "--num-prompts", "9", "--random-input-len", "5", "--max-concurrency", "1",
		"--goodput", "ttft:100000", "tpot:100000", "--metadata", "a=b", "c=d", "--save-detailed", "--result-filename", file)
	var out, errs strings.Builder
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		<-at
		_ = c.Process.Signal(os.Interrupt)
	}()
	if err := c.Wait(); err == nil || c.ProcessState.ExitCode() != 1 {
		t.Errorf("it ended with %v", err)
	}
	if !strings.HasSuffix(errs.String(), "\nkvasir: interrupted after 3 of 9 requests\n") || !strings.Contains(out.String(), "Successful requests:                     3 ") ||
		!strings.Contains(out.String(), "Request goodput") {
		t.Errorf("%s%s", out.String(), errs.String())
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if r, err := bench.ReadJSON(f); err != nil || !r.Interrupted || r.Completed != 3 || r.Unfinished != 6 || len(r.SLOs) != 2 {
		t.Errorf("%+v, %v", r, err)
	}
}

// Flags of several words end at the next flag. A mistake in a flag is reported in a line that names
// it.
func TestBenchCommandLine(t *testing.T) {
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append([]string{"bench", "--port", "1"}, args...)...)
		if got != code || !strings.Contains(stderr, want) || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%v: exit %d\n%s%s", args, got, stdout, stderr)
		}
	}
	f(1, "kvasir: no endpoint at http://127.0.0.1:1: dial: connect: connection refused\n")
	f(1, "no endpoint", "--goodput", "ttft:5", "tpot:6", "--header", "a=b", "c=d", "--num-prompts", "3")
	f(2, `kvasir: --goodput "tpot:x" is no limit: want NAME:MILLISECONDS, as ttft:500 (see kvasir bench --help)`, "--goodput", "ttft:5", "tpot:x")
	f(2, "--goodput", "--goodput")
	f(2, "got 3", "--compare", "a", "b", "c")
	f(1, "a: no such file", "--compare", "a", "b")
	f(2, "--dataset-name", "--dataset-name", "nonsense")
	f(2, "unexpected argument b", "b")
}
