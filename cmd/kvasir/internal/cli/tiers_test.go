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
	"sync"
	"testing"
	"time"
)

// A tier of the command line is used, shown by status and counted. A mistake is reported in one line
// with the likely meaning.
func TestTierOfTheCommandLine(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "by the server")
	s := serve(t, "--disk", dir+"0", "--disk-gb", "1", "--l2-adapter", fmt.Sprintf(`{"type": "fs", "base_path": %q}`, dir), fmt.Sprintf(`{"type": "fs_native", "base_path": %q, "use_odirect": true}`, dir+"2"))
	url := fmt.Sprintf("http://127.0.0.1:%d", s.http)
	if code, out, stderr := run(t, "status", "--url", url); code != 0 || !strings.Contains(out, "tier disk ") || !strings.Contains(out, "tier fs ") || !strings.Contains(out, "tier fs_native ") {
		t.Errorf("exit %d: %s%s", code, out, stderr)
	}
	r, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil || !strings.Contains(string(body), `kvasir_tier_hits_total{tier="fs"} 0`) || !strings.Contains(string(body), `kvasir_tier_hits_total{tier="fs_native"} 0`) ||
		!strings.Contains(string(body), `kvasir_tier_hits_total{tier="disk"} 0`) || !strings.Contains(string(body), "kvasir_disk_opening") {
		t.Errorf("%v: no figures of the tiers", err)
	}
	if code, out, stderr := run(t, "tier", "ls", "fs:"+dir); code != 0 || !strings.Contains(out, "0 objects") {
		t.Errorf("exit %d: %s%s", code, out, stderr)
	}
	if code, _, stderr := run(t, "tier", "drop", "fs:"+dir); code != 2 || !strings.Contains(stderr, "say what to remove") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if code, _, stderr := run(t, "tier", "verify", "disk:"+dir+"0"); code != 1 || !strings.Contains(stderr, "in use") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	f := func(want string, args ...string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--l1-size-gb", "0.01", "--shm-name", "kvasir_test_tiers"}, args...)...)
		if code == 0 || strings.Count(strings.TrimSpace(stderr), "\n") != 0 || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit %d, want one line with %q, got:\n%s", args, code, want, stderr)
		}
	}
	t.Setenv("KVASIR_SERVER_L2_ADAPTER", `{"type": "fs", "base_path": "/x", "one": 1} {"type": "fs", "base_path": "/y", "two": 2}`)
	f(`"one" is unknown; key "two" is unknown`)
	os.Unsetenv("KVASIR_SERVER_L2_ADAPTER") // the test's end sets it back
	f(`did you mean "base_path"?`, "--l2-adapter", `{"type":"fs","basepath":"/x"}`)
	f(`did you mean "fs"?`, "--l2-adapter", `{"type":"fss"}`)
	f("is no JSON object", "--l2-adapter", "/data")
	f("--l2-adapter: fs:", "--l2-adapter", `{"type":"fs","base_path":"/dev/null/x"}`)
	f("not a directory", "--l2-adapter", `{"type":"fs","base_path":"/etc/hostname"}`)
	f("--l2-prefetch-load-timeout 0 is not above 0", "--l2-prefetch-load-timeout", "0")
	f("--l2-trust", "--l2-trust", "blind")
	f("--disk needs --disk-gb", "--disk", dir+"3")
	f("--disk-gb is given without --disk", "--disk-gb", "3")
	f("less than four segments", "--disk", dir+"3", "--disk-gb", "0.001")
	f("not a directory of kvasir", "--disk", "/etc", "--disk-gb", "1")
}

// A server warms its pool from its tiers after it is ready. Where no tier knows which chunks are hot,
// --warm is refused.
func TestWarmOfTheCommandLine(t *testing.T) {
	asked := make(chan struct{})
	var once sync.Once
	bucket := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			return // the note of generations
		}
		if r.URL.Query().Get("list-type") == "" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		once.Do(func() { close(asked) })
		fmt.Fprint(w, `<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>`)
	}))
	defer bucket.Close()
	adapter := fmt.Sprintf(`{"type":"s3_native","s3_endpoint":%q,"s3_bucket":"kv","aws_access_key_id":"i","aws_secret_access_key":"s"}`, bucket.URL)
	serve(t, "--warm", "0.5", "--warm-seconds", "60", "--l2-adapter", adapter)
	select {
	case <-asked:
	case <-time.After(2 * time.Minute):
		t.Error("the bucket is not asked what it has")
	}
	for _, c := range []struct{ says, args string }{
		{"redis and s3_native do", `--warm 1`}, {"--warm -1", `--warm=-1`}, {"--warm-seconds", "--warm-seconds 0"}, {"redis and s3_native do", `--warm 1 --l2-adapter {"type":"fs","base_path":"/x"}`},
	} {
		if code, _, stderr := run(t, append([]string{"server", "--l1-size-gb", "0.1"}, strings.Fields(c.args)...)...); code != 2 || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit %d: %s", c.args, code, stderr)
		}
	}
}
