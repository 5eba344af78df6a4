// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/internal/tools/pages"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// The commands of a page work in the page's order and show the output that the page shows. The test types each shell block of each page,
// except those with a mark that excludes them (internal/tools/pages), with free ports, smaller pools, 127.0.0 in place of 10.0.0, folders below a home of its own
// in place of those in /etc, /var, /data, /mnt and /run, kvasir engine in place of vllm serve (testdata/vllm.sh), and an object store and a
// Mooncake master of the test's own. interop/vllm.sh has real
// vLLM type the pages that KVASIR_PAGES names, in namespaces of their own, with their ports and addresses (testdata/vllm-real.sh).
func TestPagesAsTyped(t *testing.T) {
	all, err := pages.All("../../../..")
	if err != nil {
		t.Fatal(err)
	}
	if named := strings.Fields(os.Getenv("KVASIR_PAGES")); len(named) > 0 {
		for _, name := range named {
			t.Run(name, func(t *testing.T) {
				page, faults := pages.Read(all[name])
				if !page.Typed() || len(faults) > 0 {
					t.Fatalf("no page to type: %q", faults)
				}
				typePage(t, &page)
			})
		}
		return
	}
	typed := 0
	for _, name := range slices.Sorted(maps.Keys(all)) {
		page, faults := pages.Read(all[name])
		for _, f := range faults {
			t.Errorf("%s: %s", name, f)
		}
		if !page.Typed() {
			continue
		}
		typed++
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			typePage(t, &page)
		})
	}
	if typed < 7 {
		t.Errorf("only %d pages are typed: the search is broken", typed)
	}
}

// The test finds a page that shows wrong output.
func TestWrongPagesAreFound(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		page, _ := pages.Read(strings.ReplaceAll(text, "''", "```"))
		d := newDesk(t)
		err := d.follow(&page)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	f("''sh\necho a\n''\n''text\nb\n''\n", `does not show "b"`)
	f("''sh\nfalse\ntrue\n''\n", "exit status 1")
	f("<!-- terminal: a -->\n''sh\necho a\n''\n''text\nb\n''\n", "ended")
	f("<!-- ctrl-c: a -->\n", "no terminal a")
	f("<!-- each -->\n''sh\necho a\nfalse # 2\n''\n", "exit status 1:\nfalse # 2")
	f("<!-- each -->\n''sh\necho 'a\nb'\necho c \\\n  d\n''\n''text\nb\nc d\ne\n''\n", `does not show "e"`)
	f("<!-- before: false -->\n''sh\ntrue\n''\n", "exit status 1:\nfalse")
}

// desk is where a page is typed: a home, terminals, and the ports of each host.
type desk struct {
	t         *testing.T
	home, bin string
	bucket    string                    // where an object store answers
	master    string                    // the port of a master of a Mooncake Store
	ports     map[string]map[string]int // by host and port of the page
	terminals map[string]*terminal
	typed     []*terminal
	wait      time.Duration // how long to wait for expected output
	model     string        // folder of the model that real vLLM serves; "": engines are simulated
}

// terminal is a shell that types one block.
type terminal struct {
	cmd   *exec.Cmd
	log   string // the file of what it shows
	ended chan struct{}
	err   error // once ended
}

var (
	pagePort = regexp.MustCompile(`\b(?:5555|5557|5558|8080|8081|8000|8001|8100|8101|8102|8200|8998|8999|9004|9095|6379|30000|30001|50051)\b`)
	pageSize = regexp.MustCompile(`(--l1-size-gb|--memory-gb)[ =][\d.]+(?:GiB)?`)
	diskSize = regexp.MustCompile(`--disk-gb \d+`)
	ofTenant = regexp.MustCompile(`\b(\d+)GiB\b`)
	limitGB  = regexp.MustCompile(`("limit_gb": )(\d+)`)
	pagePath = regexp.MustCompile(`([\s"':=(])(/(?:etc/kvasir|var/lib/kvasir|data|mnt|run)\b)`)
	models   = regexp.MustCompile(`\bQwen/Qwen2\.5-7B-Instruct\b|\bMODEL\b`)
	memory   = regexp.MustCompile(`("cpu_bytes_to_use":)\d+`)
	readers  = regexp.MustCompile(`\b(?:P-HOST|HOST|PROXY):`)
)

// serves matches the line that a command prints when it serves.
var serves = regexp.MustCompile(`serving HTTP|Bootstrap Server started|the (?:engine|proxy|relay) serves|the keeper watches|memory is mounted|Application startup complete|Ready to accept connections|mooncake_master serves`)

// bucket starts an object store with one bucket of any name, for pages with S3, and returns its address.
func bucket(t *testing.T) string {
	t.Helper()
	type object struct {
		data []byte
		meta string
	}
	var mu sync.Mutex
	objects := map[string]object{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		mu.Lock()
		defer mu.Unlock()
		o, there := objects[name]
		switch {
		case name == "" && r.Method == http.MethodGet:
			fmt.Fprint(w, "<ListBucketResult><IsTruncated>false</IsTruncated>")
			for _, n := range slices.Sorted(maps.Keys(objects)) {
				if strings.HasPrefix(n, r.URL.Query().Get("prefix")) {
					fmt.Fprintf(w, "<Contents><Key>%s</Key><Size>%d</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>", n, len(objects[n].data))
				}
			}
			fmt.Fprint(w, "</ListBucketResult>")
		case r.Method == http.MethodPut && there && r.Header.Get("If-None-Match") == "*":
			w.WriteHeader(http.StatusPreconditionFailed)
		case r.Method == http.MethodPut:
			objects[name] = object{body, r.Header.Get("X-Amz-Meta-Kvasir")}
		case r.Method == http.MethodDelete:
			delete(objects, name)
			w.WriteHeader(http.StatusNoContent)
		case !there:
			w.WriteHeader(http.StatusNotFound)
		default:
			if o.meta != "" {
				w.Header().Set("X-Amz-Meta-Kvasir", o.meta)
			}
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(o.data))
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// service names what a command serves: "kvasir server", with its host and port if it has some.
var (
	service     = regexp.MustCompile(`(?:^|\s)((?:kvasir|vllm) [a-z-]+|redis-server|mooncake_master)\b`)
	serviceHost = regexp.MustCompile(`--host[ =](127\.\S+)`) // 0.0.0.0 is all of them
	servicePort = regexp.MustCompile(`--port[ =](\d+)`)
)

func newDesk(t *testing.T) *desk {
	t.Helper()
	d := &desk{
		t: t, home: t.TempDir(), bin: t.TempDir(), ports: map[string]map[string]int{}, terminals: map[string]*terminal{}, wait: 2 * time.Minute, bucket: bucket(t), model: os.Getenv("KVASIR_PAGES_MODEL"),
	}
	_, d.master, _ = net.SplitHostPort(storetest.New(t).Addr)
	scripts := map[string]string{"kvasir": "kvasir.sh", "vllm": "vllm.sh", "mooncake_master": "mooncake_master.sh"}
	if d.model != "" {
		d.wait, scripts["vllm"] = 15*time.Minute, "vllm-real.sh"
	}
	if t.Name() == "TestWrongPagesAreFound" {
		d.wait = 5 * time.Second
	}
	for name, file := range scripts {
		script, err := os.ReadFile("testdata/" + file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d.bin, name), script, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	root, err := filepath.Abs("../../../../docs")
	if err != nil {
		t.Fatal(err)
	}
	made := []error{os.Symlink(root, filepath.Join(d.home, "docs"))}
	for _, dir := range []string{"tmp", "etc/kvasir", "var/lib/kvasir", "data", "mnt", "run"} {
		made = append(made, os.MkdirAll(filepath.Join(d.home, dir), 0o700))
	}
	made = append(made, os.WriteFile(filepath.Join(d.home, ".curlrc"), []byte("fail-with-body\n"), 0o600)) // what a server refuses is no success
	if err := errors.Join(made...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)
	return d
}

// close ends all typed commands, and removes the pools.
func (d *desk) close() {
	for _, w := range slices.Backward(d.typed) {
		_ = syscall.Kill(-w.cmd.Process.Pid, syscall.SIGTERM)
		select {
		case <-w.ended:
		case <-time.After(20*time.Second + d.wait/10):
			d.t.Errorf("did not end at SIGTERM: %q", w.cmd.Args)
		}
		_ = syscall.Kill(-w.cmd.Process.Pid, syscall.SIGKILL) // what is left of its group
		<-w.ended
	}
	for _, ports := range d.ports {
		left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/lmcache_l1_pool_kvasir_%d_*", ports["5555"]))
		for _, f := range left {
			_ = os.Remove(f)
		}
	}
}

// port returns the port that stands for one of the page on a host.
func (d *desk) port(host, port string) int {
	if d.model != "" {
		n, _ := strconv.Atoi(port)
		return n
	}
	if d.ports[host] == nil {
		d.ports[host] = map[string]int{}
	}
	if d.ports[host][port] == 0 {
		d.ports[host][port] = testkit.FreePort(d.t)
	}
	return d.ports[host][port]
}

// as returns what the test types, or looks for, in place of a text of the page.
func (d *desk) as(host, text string) string {
	if d.model == "" {
		text = strings.ReplaceAll(text, "10.0.0.", "127.0.0.")
	} else {
		text = models.ReplaceAllString(text, d.model)
	}
	text = pageSize.ReplaceAllString(text, "$1 0.0625")
	text = diskSize.ReplaceAllString(text, "--disk-gb 1")
	text = strings.ReplaceAll(text, "bin/kvasir", "kvasir")
	return pagePort.ReplaceAllStringFunc(text, func(p string) string {
		if p == "50051" {
			return d.master
		}
		if p == "6379" { // hosts share it
			return fmt.Sprint(d.port("", p))
		}
		return fmt.Sprint(d.port(host, p))
	})
}

// typing returns what the test types in place of commands of the page: the text of as, with smaller quotas, folders below the test's
// home, and this host in place of the reader's.
func (d *desk) typing(host, text string) string {
	text = d.as(host, text)
	text = ofTenant.ReplaceAllStringFunc(text, func(size string) string { // of a pool of 100 GiB, which has 64 MiB here
		n, _ := strconv.Atoi(strings.TrimSuffix(size, "GiB"))
		return fmt.Sprint(n*512, "KiB")
	})
	text = memory.ReplaceAllString(text, "${1}268435456")
	text = limitGB.ReplaceAllString(text, "${1}0.0$2")
	text = pagePath.ReplaceAllString(text, "${1}"+d.home+"$2")
	return readers.ReplaceAllString(text, "127.0.0.1:")
}

// start types a block.
func (d *desk) start(host, text string) (*terminal, error) {
	w := &terminal{log: filepath.Join(d.t.TempDir(), "shown"), ended: make(chan struct{})}
	out, err := os.Create(w.log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	w.cmd = exec.Command("bash", "-c", "set -e -o pipefail\n"+text)
	w.cmd.Dir, w.cmd.Stdout, w.cmd.Stderr = d.home, out, out
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	w.cmd.Env = append(os.Environ(), "HOME="+d.home, "TMPDIR="+filepath.Join(d.home, "tmp"), "PATH="+d.bin+":"+os.Getenv("PATH"), "KVASIR_TEST_COMMAND=1", "KVASIR_TEST_BINARY="+os.Args[0],
		"AWS_ENDPOINT_URL="+d.bucket, "AWS_ACCESS_KEY_ID=id", "AWS_SECRET_ACCESS_KEY=secret")
	for name, port := range map[string]string{
		"KVASIR_SERVER_PORT": "5555", "KVASIR_SERVER_HTTP_PORT": "8080", "KVASIR_ENGINE_PORT": "8100", "KVASIR_PROXY_PORT": "8000", "KVASIR_BOOTSTRAP_PORT": "8998",
		"KVASIR_RELAY_PORT": "8999", "KVASIR_STORE_NODE_HTTP_PORT": "9004", "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998", "TEST_LMCACHE_PORT": "5555", "TEST_HTTP_PORT": "8080", "TEST_VLLM_PORT": "8000",
	} {
		w.cmd.Env = append(w.cmd.Env, fmt.Sprintf("%s=%d", name, d.port(host, port)))
	}
	if err := w.cmd.Start(); err != nil {
		return nil, err
	}
	d.typed = append(d.typed, w)
	go func() {
		w.err = w.cmd.Wait()
		close(w.ended)
	}()
	return w, nil
}

func (w *terminal) shown() string {
	text, _ := os.ReadFile(w.log)
	return string(text)
}

// follow types a page.
func (d *desk) follow(p *pages.Page) error {
	for _, command := range p.Before {
		if err := d.each(&pages.Step{Text: command + "\n"}); err != nil {
			return err
		}
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.NotTyped != "" {
			continue
		}
		if err := d.step(s); err != nil {
			return fmt.Errorf("line %d: %w", s.Line, err)
		}
	}
	return nil
}

func (d *desk) step(s *pages.Step) error {
	switch {
	case s.Interrupt != "":
		return d.interrupt(s.Interrupt)
	case s.Each:
		return d.each(s)
	}
	text, shown := d.typing(s.Host, s.Text), d.as(s.Host, s.Shown)
	end := time.Now().Add(d.wait)
	for {
		w, err := d.start(s.Host, text)
		if err != nil {
			return err
		}
		if s.Terminal != "" {
			d.terminals[s.Terminal] = w
			return d.await(w, shown, end)
		}
		ctx, cancel := context.WithTimeout(d.t.Context(), max(2*time.Minute, d.wait))
		select {
		case <-w.ended:
		case <-ctx.Done():
		}
		cancel()
		missing := pages.Missing(shown, w.shown())
		switch {
		case ctx.Err() != nil && w.cmd.ProcessState == nil:
			return fmt.Errorf("it does not end:\n%s\n%s", text, w.shown())
		case w.err == nil && missing == "":
			return nil
		case s.Soon && time.Now().Before(end):
			time.Sleep(20 * time.Millisecond)
		case w.err != nil:
			return fmt.Errorf("%w:\n%s\n%s", w.err, text, w.shown())
		default:
			return fmt.Errorf("it does not show %q:\n%s\n%s", missing, text, w.shown())
		}
	}
}

// interrupt presses Ctrl-C in a terminal, and waits for its end.
func (d *desk) interrupt(name string) error {
	w := d.terminals[name]
	if w == nil {
		return fmt.Errorf("there is no terminal %s", name)
	}
	delete(d.terminals, name)
	_ = syscall.Kill(-w.cmd.Process.Pid, syscall.SIGINT)
	select {
	case <-w.ended:
		return nil
	case <-time.After(time.Minute):
		return fmt.Errorf("Ctrl-C did not end it:\n%s", w.shown())
	}
}

// commands splits a block into commands. A command continues in the next line while bash finds it incomplete.
func commands(text string) (out []string) {
	next := ""
	for line := range strings.Lines(text) {
		next += line
		if strings.HasPrefix(next, "#") {
			next = ""
			continue
		}
		if strings.HasSuffix(next, "\\\n") || exec.Command("bash", "-n", "-c", next).Run() != nil {
			continue
		}
		out = append(out, next)
		next = ""
	}
	if next != "" {
		out = append(out, next)
	}
	return out
}

// each types each command of a block in a terminal of its own, when the command before it has ended or serves. A command that serves runs until
// the page's end, or until a later command that serves the same replaces it.
func (d *desk) each(s *pages.Step) error {
	var shown strings.Builder
	for _, command := range commands(d.typing(s.Host, s.Text)) {
		name := ""
		if m := service.FindStringSubmatch(command); m != nil {
			name = m[1]
			for _, at := range []*regexp.Regexp{serviceHost, servicePort} {
				if place := at.FindStringSubmatch(command); place != nil {
					name += " " + place[1]
				}
			}
		}
		if d.terminals[name] != nil {
			if err := d.interrupt(name); err != nil {
				return err
			}
		}
		w, err := d.start(s.Host, command)
		if err != nil {
			return err
		}
		for end := time.Now().Add(d.wait); ; {
			over := false
			select {
			case <-w.ended:
				over = true
			default:
			}
			if over && w.err != nil {
				return fmt.Errorf("%w:\n%s\n%s", w.err, command, w.shown())
			}
			if over {
				break
			}
			if serves.MatchString(w.shown()) {
				d.terminals[name] = w
				break
			}
			if time.Now().After(end) {
				return fmt.Errorf("it neither ends nor serves:\n%s\n%s", command, w.shown())
			}
			time.Sleep(5 * time.Millisecond)
		}
		shown.WriteString(w.shown())
	}
	if missing := pages.Missing(d.as(s.Host, s.Shown), shown.String()); missing != "" {
		return fmt.Errorf("it does not show %q:\n%s", missing, shown.String())
	}
	return nil
}

// await waits until a running terminal shows the expected text.
func (d *desk) await(w *terminal, shown string, end time.Time) error {
	for {
		over := false
		select {
		case <-w.ended:
			over = true
		default:
		}
		missing := pages.Missing(shown, w.shown())
		switch {
		case over:
			return fmt.Errorf("it ended (%v):\n%s", w.err, w.shown())
		case missing == "":
			return nil
		case time.Now().After(end):
			return fmt.Errorf("it does not show %q:\n%s", missing, w.shown())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func typePage(t *testing.T, page *pages.Page) {
	for _, program := range append([]string{"bash", "curl"}, page.Needs...) {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	d, began := newDesk(t), time.Now()
	if err := d.follow(page); err != nil {
		for name, w := range d.terminals {
			t.Logf("terminal %s:\n%s", name, w.shown())
		}
		t.Fatal(err)
	}
	if took := time.Since(began); took > 5*time.Minute && d.model == "" {
		t.Errorf("a reader who types as fast needs more than five minutes: %v", took)
	}
}
