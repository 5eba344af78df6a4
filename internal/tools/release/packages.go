// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

func writeDeb(b *build, out string) (string, error) { return writePackage(b, out, "deb") }
func writeRPM(b *build, out string) (string, error) { return writePackage(b, out, "rpm") }

// places says to which path of a package each file of the archive goes; "": it is not installed.
var places = []struct{ from, to string }{
	{"kvasir", "/usr/bin/kvasir"},
	{"README.md", "/usr/share/doc/kvasir/README.md"},
	{"CHANGELOG.md", "/usr/share/doc/kvasir/CHANGELOG.md"},
	{"LICENSE", "/usr/share/doc/kvasir/copyright"},
	{"man/", "/usr/share/man/man1/"},
	{"completions/kvasir.bash", "/usr/share/bash-completion/completions/kvasir"},
	{"completions/_kvasir", "/usr/share/zsh/vendor-completions/_kvasir"},
	{"completions/kvasir.fish", "/usr/share/fish/vendor_completions.d/kvasir.fish"},
	{"scripts/", ""},   // the package runs these scripts, but does not install them
	{"install.sh", ""}, // only in the archive
	{"systemd/kvasir.sysusers", "/usr/lib/sysusers.d/kvasir.conf"},
	{"systemd/", "/usr/lib/systemd/system/"},
	{"config/", "/etc/kvasir/"},
}

// placesOfRPM are the paths that differ in an rpm.
var placesOfRPM = map[string]string{
	"completions/_kvasir":   "/usr/share/zsh/site-functions/_kvasir", // zsh looks there on Fedora and SUSE
	"scripts/postremove.sh": "/usr/share/kvasir/postremove.sh",       // rpm has no purge: docs/operate/install.md
}

// placeOf returns the path in a package for a file of the archive; "": the package does not install it. It returns false if places has
// no row for the file.
func placeOf(name, format string) (string, bool) {
	if to, ok := placesOfRPM[name]; ok && format == "rpm" {
		return to, true
	}
	for _, p := range places {
		rest, below := strings.CutPrefix(name, p.from)
		switch {
		case name == p.from, below && strings.HasSuffix(p.from, "/") && p.to == "":
			return p.to, true
		case below && strings.HasSuffix(p.from, "/"):
			return path.Join(p.to, rest), true
		}
	}
	return "", false
}

func writePackage(b *build, out, format string) (string, error) {
	work, err := os.MkdirTemp("", "kvasir-package-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	contents := files.Contents{{Destination: "/var/lib/kvasir", Type: files.TypeDir, FileInfo: &files.ContentFileInfo{Mode: 0o755, MTime: b.date}}}
	for _, f := range b.files {
		to, ok := placeOf(f.path, format)
		if !ok {
			return "", fmt.Errorf("%s has no place in a package", f.path)
		}
		if to == "" {
			continue
		}
		from := filepath.Join(work, filepath.FromSlash(f.path))
		if err := os.MkdirAll(filepath.Dir(from), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(from, f.text, 0o644); err != nil {
			return "", err
		}
		kind := files.TypeFile
		if strings.HasPrefix(to, "/etc/") {
			kind = files.TypeConfigNoReplace
		}
		contents = append(contents, &files.Content{Source: from, Destination: to, Type: kind, FileInfo: &files.ContentFileInfo{Mode: os.FileMode(f.mode), MTime: b.date, Owner: "root", Group: "root"}})
	}
	scripts := map[string]string{}
	for _, name := range []string{"postinstall", "preremove", "postremove"} {
		scripts[name] = filepath.Join("cmd/kvasir/packaging/scripts", name+".sh")
	}
	info := nfpm.WithDefaults(&nfpm.Info{
		Name: "kvasir", Arch: b.arch, Platform: "linux", Version: b.version, Release: "1", Section: "net", Priority: "optional",
		Maintainer: "The Kvasir authors <kvasir@localhost.invalid>", Vendor: "Kvasir", Homepage: "https://github.com/kvasir-kv/kvasir", License: "Apache-2.0",
		Description: "KV-cache data plane for LLM serving\nServes KV caches of vLLM and SGLang engines from memory, disks and object stores,\nmoves them between prefill and decode engines, and stands in front of engines as a proxy.",
		MTime:       b.date,
		Overridables: nfpm.Overridables{
			Contents: contents,
			Scripts:  nfpm.Scripts{PostInstall: scripts["postinstall"], PreRemove: scripts["preremove"], PostRemove: scripts["postremove"]},
			RPM:      nfpm.RPM{Compression: "gzip", BuildHost: "localhost"},
			Deb:      nfpm.Deb{Compression: "gzip"},
		},
	})
	if err := nfpm.PrepareForPackager(info, format); err != nil {
		return "", err
	}
	packager, err := nfpm.Get(format)
	if err != nil {
		return "", err
	}
	var packed bytes.Buffer
	if err := packager.Package(info, &packed); err != nil {
		return "", err
	}
	name := packager.ConventionalFileName(info)
	return name, os.WriteFile(filepath.Join(out, name), packed.Bytes(), 0o644)
}
