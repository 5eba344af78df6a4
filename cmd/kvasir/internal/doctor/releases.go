// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// peer is a program that Kvasir works with, and the range of its releases that checks were run with. docs/reference/compatibility.md
// lists the checks; a test compares that page with this list.
type peer struct {
	name        string
	packages    []string // names of the Python distributions that contain it
	first, last string   // the oldest and the newest release that checks were run with; patch releases of the newest count too
	below       Level    // the level of a finding about a release older than first
	belowText   string
	apart       map[string]string // why a release between first and last does not work, by MAJOR.MINOR
}

var peers = []peer{
	{name: "vllm", packages: []string{"vllm"}, first: "0.13.0", last: "0.33.0", below: Warning, belowText: "no check was run with it", apart: map[string]string{
		"0.14": "its MooncakeConnector cannot pair P and D", "0.15": "its MooncakeConnector cannot pair P and D",
	}},
	{name: "lmcache", packages: []string{"lmcache"}, first: "0.4.6", last: "0.5.7", below: Error, belowText: "it knows CUDA IPC only, and is declined"},
	{
		name: "mooncake", packages: []string{"mooncake_transfer_engine", "mooncake_transfer_engine_cuda13", "mooncake_transfer_engine_non_cuda"},
		first: "0.3.7", last: "0.3.14", below: Warning, belowText: "no check was run with it",
	},
	{name: "sglang", packages: []string{"sglang"}, first: "0.5.23", last: "0.5.23", below: Warning, belowText: "no check was run with it"},
}

// release is the first three numbers of a version. Texts may follow them in the version, as in 0.5.7rc2 and 0.32.0+cpu.
type release [3]int

// parseRelease reads the release in a version. ok is false if the version does not begin with a number.
func parseRelease(text string) (r release, ok bool) {
	for i, part := range strings.SplitN(text, ".", 4) {
		digits := part
		if end := strings.IndexFunc(part, func(c rune) bool { return c < '0' || c > '9' }); end >= 0 {
			digits = part[:end]
		}
		n, err := strconv.Atoi(digits)
		if err != nil || i > 2 {
			break
		}
		r[i], ok = n, true
		if digits != part {
			break
		}
	}
	return r, ok
}

func (r release) before(o release) bool {
	for i := range r {
		if r[i] != o[i] {
			return r[i] < o[i]
		}
	}
	return false
}

// judge says how well a version works with Kvasir: a level, and the reason unless the level is OK.
func (p *peer) judge(version string) (Level, string) {
	v, ok := parseRelease(version)
	first, _ := parseRelease(p.first)
	last, _ := parseRelease(p.last)
	switch {
	case !ok:
		return Warning, "its version cannot be read"
	case v.before(first):
		return p.below, p.belowText
	case last.before(v):
		return Warning, "it is newer than every release that a check was run with"
	}
	if why := p.apart[fmt.Sprintf("%d.%d", v[0], v[1])]; why != "" {
		return Warning, why
	}
	return OK, ""
}

// releases checks the packages in the environments of running engines, and in those that Options.Pythons names.
func (d *doctor) releases(ctx context.Context, all []*process) {
	mark := d.mark()
	seen := map[string]bool{}
	some := false
	for _, p := range all {
		if !p.isEngine() {
			continue
		}
		var roots []string
		for _, name := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
			roots = append(roots, p.environ[name])
		}
		for _, a := range p.args[:min(len(p.args), 2)] { // the interpreter, or a script in its directory
			if filepath.IsAbs(a) {
				roots = append(roots, filepath.Dir(filepath.Dir(a)))
			}
		}
		for _, root := range append(roots, "/usr/local", "/usr") {
			if root == "" || seen[root] {
				continue
			}
			seen[root] = true
			if d.judgeAll(sitePackages(filepath.Join(p.dir, "root", root)), root) {
				some = true
				break
			}
		}
	}
	for _, python := range d.Pythons {
		dirs, err := pythonPath(ctx, python)
		switch {
		case err != nil:
			d.add(Error, releases, "--python "+python+" cannot be looked at", err.Error(), "name an interpreter, or the directory of an environment")
		case !d.judgeAll(dirs, python):
			d.add(Warning, releases, "--python "+python+" has none of vllm, lmcache, mooncake and sglang", "", "")
		}
		some = true
	}
	if !some {
		d.add(Info, releases, "not looked at: no engine runs that this user may look into; --python PATH names an environment", "", "")
		return
	}
	d.okIfNone(mark, releases, "every release was run with Kvasir")
}

// judgeAll adds a finding for each package of a peer in dirs, which belong to the environment or process `where`. It returns false if there
// is no such package.
func (d *doctor) judgeAll(dirs []string, where string) (some bool) {
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // a directory that cannot be read has no entries
		for _, e := range entries {
			name, ok := strings.CutSuffix(e.Name(), ".dist-info")
			if !ok {
				continue
			}
			name, version, _ := strings.Cut(name, "-")
			name = strings.ToLower(strings.ReplaceAll(name, ".", "_"))
			for i := range peers {
				p := &peers[i]
				for _, known := range p.packages {
					if name != known {
						continue
					}
					some = true
					level, why := p.judge(version)
					text := fmt.Sprintf("%s %s in %s", name, version, where)
					if level == OK {
						d.add(OK, releases, text, "", "")
						continue
					}
					d.add(level, releases, text, why, fmt.Sprintf("pip install '%s>=%s,<=%s' (docs/reference/compatibility.md has what was run)", strings.ReplaceAll(name, "_", "-"), p.first, p.last))
				}
			}
		}
	}
	return some
}

// sitePackages returns the directories with packages of the Python environment at root.
func sitePackages(root string) (dirs []string) {
	for _, pattern := range []string{"lib*/python3*/site-packages", "lib/python3*/dist-packages"} {
		found, _ := filepath.Glob(filepath.Join(root, pattern)) // the pattern is well-formed, so there is no error
		for _, f := range found {
			at, err := filepath.EvalSymlinks(f) // lib64 is often a link to lib
			if err != nil || slices.Contains(dirs, at) {
				continue
			}
			if info, err := os.Stat(at); err == nil && info.IsDir() { // a FIFO in a container would keep its reader waiting
				dirs = append(dirs, at)
			}
		}
	}
	return dirs
}

// pythonTime is how long the start of a Python interpreter may take.
const pythonTime = 20 * time.Second

// pythonPath returns the directories with the packages of an interpreter or of an environment. path is either of the two.
func pythonPath(ctx context.Context, path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		dirs := sitePackages(path)
		if len(dirs) == 0 {
			return nil, errors.New("it is a directory without lib/python3*/site-packages")
		}
		return dirs, nil
	}
	ctx, cancel := context.WithTimeout(ctx, pythonTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-I", "-c", `import sys; print("\n".join(sys.path))`)
	cmd.WaitDelay = time.Second
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n"), nil
}

// Releases returns a list for each peer, by its name: the first and the last release that checks were run with, then the releases
// between them that do not work.
func Releases() map[string][]string {
	out := map[string][]string{}
	for _, p := range peers {
		out[p.name] = append([]string{p.first, p.last}, slices.Sorted(maps.Keys(p.apart))...)
	}
	return out
}
