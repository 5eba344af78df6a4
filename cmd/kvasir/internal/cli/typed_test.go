// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/internal/tools/pages"
)

// What a page has its reader type works, in its order, and shows what the page says. The test types each shell block of each page that
// has no mark against it (internal/tools/pages), with free ports, smaller pools, 127.0.0 in place of 10.0.0, and kvasir engine in place of
// vllm serve (testdata/vllm.sh).
func TestPagesAsTyped(t *testing.T) {
	all, err := pages.All("../../../..")
	if err != nil {
		t.Fatal(err)
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

// A page that shows what is not so is found.
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
}

// desk is where a page is typed: a home, terminals, and the ports of each host.
type desk struct {
	t         *testing.T
	home, bin string
	ports     map[string]map[string]int // by host and port of the page
	terminals map[string]*terminal
	typed     []*terminal
	wait      time.Duration // for what should be seen
}

// terminal is a shell that types one block.
type terminal struct {
	cmd   *exec.Cmd
	log   string // the file of what it shows
	ended chan struct{}
	err   error // once ended
}

var (
	pagePort = regexp.MustCompile(`\b(?:5555|8080|8000|8001|8100|8101|8102|8200|8998|8999|6379)\b`)
	pageSize = regexp.MustCompile(`(--l1-size-gb|--memory-gb)[ =][\d.]+`)
	diskSize = regexp.MustCompile(`--disk-gb \d+`)
)

func newDesk(t *testing.T) *desk {
	t.Helper()
	d := &desk{
		t: t, home: t.TempDir(), bin: t.TempDir(), ports: map[string]map[string]int{}, terminals: map[string]*terminal{}, wait: 2 * time.Minute,
	}
	if t.Name() == "TestWrongPagesAreFound" {
		d.wait = 5 * time.Second
	}
	for _, name := range []string{"kvasir", "vllm"} {
		script, err := os.ReadFile("testdata/" + name + ".sh")
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
	if err := errors.Join(os.Symlink(root, filepath.Join(d.home, "docs")), os.Mkdir(filepath.Join(d.home, "tmp"), 0o700)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.close)
	return d
}

// close ends what was typed, and removes the pools.
func (d *desk) close() {
	for _, w := range slices.Backward(d.typed) {
		_ = syscall.Kill(-w.cmd.Process.Pid, syscall.SIGTERM)
		select {
		case <-w.ended:
		case <-time.After(20 * time.Second):
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
	text = strings.ReplaceAll(text, "10.0.0.", "127.0.0.")
	text = pageSize.ReplaceAllString(text, "$1 0.0625")
	text = diskSize.ReplaceAllString(text, "--disk-gb 1")
	text = strings.ReplaceAll(text, "bin/kvasir", "kvasir")
	return pagePort.ReplaceAllStringFunc(text, func(p string) string {
		if p == "6379" { // hosts share it
			return fmt.Sprint(d.port("", p))
		}
		return fmt.Sprint(d.port(host, p))
	})
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
	w.cmd.Env = append(os.Environ(), "HOME="+d.home, "TMPDIR="+filepath.Join(d.home, "tmp"), "PATH="+d.bin+":"+os.Getenv("PATH"), "KVASIR_TEST_COMMAND=1", "KVASIR_TEST_BINARY="+os.Args[0])
	for name, port := range map[string]string{
		"KVASIR_SERVER_PORT": "5555", "KVASIR_SERVER_HTTP_PORT": "8080", "KVASIR_ENGINE_PORT": "8100", "KVASIR_PROXY_PORT": "8000", "KVASIR_BOOTSTRAP_PORT": "8998",
		"KVASIR_RELAY_PORT": "8999", "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998", "TEST_LMCACHE_PORT": "5555", "TEST_HTTP_PORT": "8080", "TEST_VLLM_PORT": "8000",
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
	if s.Interrupt != "" {
		w := d.terminals[s.Interrupt]
		if w == nil {
			return fmt.Errorf("there is no terminal %s", s.Interrupt)
		}
		delete(d.terminals, s.Interrupt)
		_ = syscall.Kill(-w.cmd.Process.Pid, syscall.SIGINT)
		select {
		case <-w.ended:
			return nil
		case <-time.After(time.Minute):
			return fmt.Errorf("Ctrl-C did not end it:\n%s", w.shown())
		}
	}
	text, shown := d.as(s.Host, s.Text), d.as(s.Host, s.Shown)
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
		ctx, cancel := context.WithTimeout(d.t.Context(), 2*time.Minute)
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

// await waits until a terminal that goes on shows what it should.
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
	if took := time.Since(began); took > 5*time.Minute {
		t.Errorf("a reader who types as fast needs more than five minutes: %v", took)
	}
}
