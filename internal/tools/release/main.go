// SPDX-License-Identifier: Apache-2.0

// Command release builds all parts of a release: for each platform a static binary with manual, completions, units and configurations
// as an archive, a deb and an rpm, an OCI image without a base image, and a list of modules (CycloneDX); the pages as a web site; and
// checksums of all of them. It must run in the root of the repository, and prints what it has written. Two runs from one commit write
// equal bytes, wherever and whenever they run: all times are that of the commit, or SOURCE_DATE_EPOCH.
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	out := flag.String("out", "dist", "directory to write to; it must be empty or missing")
	archs := flag.String("arch", "amd64,arm64", "architectures, by commas")
	systems := flag.String("os", "linux,darwin", "operating systems, by commas; for darwin an archive and a list of modules")
	flag.Parse()
	if err := run(*out, strings.Split(*systems, ","), strings.Split(*archs, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// build has the inputs for the artefacts of one platform.
type build struct {
	version string // 0.1.0
	system  string // linux or darwin
	arch    string // in Go's form
	date    time.Time
	binary  string // path of the binary
	info    *buildinfo.BuildInfo
	files   []file // files of the archive, sorted by path
}

// file is a file in an artefact.
type file struct {
	path string // path in the archive
	text []byte
	mode int64
}

func run(out string, systems, archs []string) error {
	for _, s := range systems {
		if s != "linux" && s != "darwin" {
			return fmt.Errorf("no release is built for %s: want linux or darwin", s)
		}
	}
	for _, a := range archs {
		if a != "amd64" && a != "arm64" {
			return fmt.Errorf("no release is built for %s: want amd64 or arm64", a)
		}
	}
	if entries, err := os.ReadDir(out); err == nil && len(entries) > 0 {
		return fmt.Errorf("%s has files: remove it first", out)
	}
	date, err := commitDate()
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "kvasir-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	host := filepath.Join(work, "host")
	if err := compile(host, runtime.GOOS, runtime.GOARCH); err != nil {
		return err
	}
	common, version, err := commonFiles(host, work, date)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	name, err := writeSite(work, version, date, out)
	if err != nil {
		return fmt.Errorf("site: %w", err)
	}
	names := []string{name}
	fmt.Println(filepath.Join(out, name))
	for _, system := range systems {
		for _, arch := range archs {
			b := &build{version: version, system: system, arch: arch, date: date, binary: filepath.Join(work, "kvasir-"+system+"-"+arch)}
			written, err := platform(b, common, out)
			if err != nil {
				return fmt.Errorf("%s/%s: %w", system, arch, err)
			}
			names = append(names, written...)
		}
	}
	return writeSums(out, names)
}

// platform writes the artefacts of one platform. macOS gets no units and no packages, because commands that need shared memory do not
// run there.
func platform(b *build, common []file, out string) (names []string, err error) {
	if err := compile(b.binary, b.system, b.arch); err != nil {
		return nil, err
	}
	if b.info, err = buildinfo.ReadFile(b.binary); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(b.binary)
	if err != nil {
		return nil, err
	}
	writers := []func(*build, string) (string, error){writeArchive, writeBOM, writeDeb, writeRPM, writeImage}
	b.files = append(slices.Clone(common), file{"kvasir", text, 0o755})
	if b.system != "linux" {
		writers = writers[:2]
		b.files = slices.DeleteFunc(b.files, func(f file) bool {
			return strings.HasPrefix(f.path, "systemd/") || strings.HasPrefix(f.path, "scripts/") || f.path == "install.sh"
		})
	}
	slices.SortFunc(b.files, func(a, b file) int { return strings.Compare(a.path, b.path) })
	for _, write := range writers {
		name, err := write(b, out)
		if err != nil {
			return nil, err
		}
		names = append(names, name)
		fmt.Println(filepath.Join(out, name))
	}
	return names, nil
}

// compile builds the kvasir command, with the commit recorded in it.
func compile(path, system, arch string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=true", "-ldflags", "-s -w", "-o", path, "./cmd/kvasir")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+arch, "GOFLAGS=", "GOAMD64=v1", "GOARM64=v8.0", "GOTOOLCHAIN=local")
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

// commitDate returns the time for all files: SOURCE_DATE_EPOCH, or else the time of the commit. It fails if the tree has uncommitted
// changes.
func commitDate() (time.Time, error) {
	status, err := exec.Command("git", "status", "--porcelain").Output()
	if err != nil {
		return time.Time{}, fmt.Errorf("git status: %w: a release is built from a clone", err)
	}
	if len(status) > 0 {
		return time.Time{}, errors.New("the tree has changes: commit them first, a release is of a commit")
	}
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := exec.Command("git", "log", "-1", "--format=%ct").Output()
		if err != nil {
			return time.Time{}, fmt.Errorf("git log: %w", err)
		}
		text = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH is %q: want seconds since 1970", text)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// commonFiles returns the files that all platforms have, and the version. host is the binary for this machine: it writes the manual and
// the completions, and prints the version.
func commonFiles(host, work string, date time.Time) (files []file, version string, err error) {
	ask := func(args ...string) ([]byte, error) {
		cmd := exec.Command(host, args...)
		cmd.Env = append(os.Environ(), fmt.Sprint("SOURCE_DATE_EPOCH=", date.Unix()))
		cmd.Stderr = os.Stderr
		return cmd.Output()
	}
	line, err := ask("--version")
	if err != nil {
		return nil, "", err
	}
	version, _, _ = strings.Cut(strings.Fields(string(line))[1], "+")
	if strings.Contains(string(line), ".dirty") {
		return nil, "", errors.New("the binary says that the tree has changes")
	}
	pages := filepath.Join(work, "man")
	if _, err := ask("man", pages); err != nil {
		return nil, "", err
	}
	add := func(from, to string, mode int64) error {
		text, err := os.ReadFile(from)
		files = append(files, file{to, text, mode})
		return err
	}
	var errs []error
	for _, name := range []string{"README.md", "LICENSE", "CHANGELOG.md"} {
		errs = append(errs, add(name, name, 0o644))
	}
	for dir, to := range map[string]string{pages: "man", "cmd/kvasir/packaging/systemd": "systemd", "cmd/kvasir/packaging/config": "config", "cmd/kvasir/packaging/scripts": "scripts"} {
		entries, err := os.ReadDir(dir)
		errs = append(errs, err)
		for _, e := range entries {
			errs = append(errs, add(filepath.Join(dir, e.Name()), to+"/"+e.Name(), 0o644))
		}
	}
	errs = append(errs, add("cmd/kvasir/internal/cli/all.yaml", "config/kvasir.yaml", 0o644), add("cmd/kvasir/packaging/install.sh", "install.sh", 0o755))
	for shell, name := range map[string]string{"bash": "kvasir.bash", "zsh": "_kvasir", "fish": "kvasir.fish"} {
		text, err := ask("completion", shell)
		files = append(files, file{"completions/" + name, text, 0o644})
		errs = append(errs, err)
	}
	return files, version, errors.Join(errs...)
}

// writeSums writes the checksums of the artefacts in the form of sha256sum(1).
func writeSums(out string, names []string) error {
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(text), name)
	}
	fmt.Println(filepath.Join(out, "SHA256SUMS"))
	return os.WriteFile(filepath.Join(out, "SHA256SUMS"), []byte(b.String()), 0o644)
}
