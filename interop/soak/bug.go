// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// buildWith builds cmd/kvasir with the change of a patch, where there is one, with clocks that the driver steps, where that is wanted, and with
// a signal that makes it collect. All stay outside of the working tree: the compiler takes the changed files from an overlay. The result is DIR/kvasir.
func buildWith(ctx context.Context, patch string, clocks bool, dir string) (binary string, err error) {
	changed := map[string]string{}
	if patch != "" {
		if err := patched(ctx, patch, dir, changed); err != nil {
			return "", err
		}
	}
	if clocks {
		if err := steppedTime(ctx, dir, changed); err != nil {
			return "", err
		}
	}
	if err := collecting(dir, changed); err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	if err := writeJSON(overlay, map[string]any{"Replace": changed}); err != nil {
		return "", err
	}
	binary = filepath.Join(dir, "kvasir")
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "-o", binary, "./cmd/kvasir")
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return "", errors.Join(fmt.Errorf("build with %v changed", slices.Sorted(maps.Keys(changed))), err)
	}
	return binary, nil
}

// patched applies a patch of one file.
func patched(ctx context.Context, patch, dir string, changed map[string]string) error {
	text, err := os.ReadFile(patch)
	if err != nil {
		return err
	}
	var path string
	for line := range strings.Lines(string(text)) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "+++ b/"); ok {
			if path != "" {
				return fmt.Errorf("%s changes more than one file", patch)
			}
			path = p
		}
	}
	if path == "" {
		return fmt.Errorf("%s changes no file", patch)
	}
	to := filepath.Join(dir, filepath.Base(path))
	cmd := exec.CommandContext(ctx, "patch", "--quiet", "--output", to, path, patch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("patch %s: %w: %s", path, err, out)
	}
	original, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	changed[original] = to
	return nil
}

// collectSignal makes such a build collect, return free memory to the kernel, and write what its heap has.
const collectSignal = syscall.SIGUSR2

// heapEnv names the file of that profile, which go tool pprof reads. FILE.first is that of the first time in a life.
const heapEnv = "KVASIR_SOAK_HEAP"

const collectFile = `package main

import (
	"os"
	"os/signal"
	"runtime/debug"
	"runtime/pprof"
	"syscall"
)

func init() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGUSR2)
	path, first := os.Getenv("` + heapEnv + `"), ".first"
	go func() {
		for range c {
			debug.FreeOSMemory()
			if path == "" {
				continue
			}
			if f, err := os.Create(path + first); err == nil {
				pprof.Lookup("heap").WriteTo(f, 0)
				f.Close()
			}
			first = ""
		}
	}()
}
`

// collecting adds a file to cmd/kvasir.
func collecting(dir string, changed map[string]string) error {
	to := filepath.Join(dir, "go_collect.go")
	if err := os.WriteFile(to, []byte(collectFile), 0o644); err != nil {
		return err
	}
	at, err := filepath.Abs(filepath.Join("cmd", "kvasir", "collect.go"))
	if err != nil {
		return err
	}
	changed[at] = to
	return nil
}

// clockEnv names the file with the seconds that a process adds to its wall clock. Its monotonic clock stays.
const clockEnv = "KVASIR_SOAK_CLOCK"

// steppedNow is what Go's time.Now begins with in such a build.
const steppedNow = `	sec, nsec, mono := runtimeNow()
	if mono != 0 {
		sec += stepped()
	}
`

// steppedFile reads the file each 20 ms, on a goroutine: the runtime calls time.Now where no file can be read.
const steppedFile = `package time

import (
	"sync/atomic"
	"syscall"
)

var steppedBy atomic.Int64

func stepped() int64 { return steppedBy.Load() }

func init() {
	path, ok := syscall.Getenv("` + clockEnv + `")
	if !ok {
		return
	}
	read := func() {
		fd, err := open(path)
		if err != nil {
			return
		}
		var b [24]byte
		n, err := read(fd, b[:])
		closefd(fd)
		if err != nil || n <= 0 {
			return
		}
		by, sign := int64(0), int64(1)
		for _, c := range b[:n] {
			switch {
			case c == '-':
				sign = -1
			case '0' <= c && c <= '9':
				by = 10*by + int64(c-'0')
			}
		}
		steppedBy.Store(sign * by)
	}
	read()
	go func() {
		for {
			Sleep(20 * Millisecond)
			read()
		}
	}()
}
`

// steppedTime changes Go's package time.
func steppedTime(ctx context.Context, dir string, changed map[string]string) error {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	at := filepath.Join(strings.TrimSpace(string(root)), "src", "time")
	text, err := os.ReadFile(filepath.Join(at, "time.go"))
	if err != nil {
		return err
	}
	begin := "func Now() Time {\n"
	now := strings.Replace(string(text), begin+"	sec, nsec, mono := runtimeNow()\n", begin+steppedNow, 1)
	if now == string(text) {
		return errors.New("time.Now of this Go begins differently: clocks cannot be stepped")
	}
	for name, text := range map[string]string{"time.go": now, "stepped.go": steppedFile} {
		to := filepath.Join(dir, "go_"+name)
		if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
			return err
		}
		changed[filepath.Join(at, name)] = to
	}
	return nil
}
