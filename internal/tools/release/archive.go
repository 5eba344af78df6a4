// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// writeArchive writes kvasir-VERSION-OS-ARCH.tar.gz, which contains one folder of that name.
func writeArchive(b *build, out string) (string, error) {
	return pack(fmt.Sprintf("kvasir-%s-%s-%s", b.version, b.system, b.arch), b.files, b.date, out)
}

// writeSite writes kvasir-VERSION-site.tar.gz with the pages as a web site.
func writeSite(work, version string, date time.Time, out string) (string, error) {
	tool, dir := filepath.Join(work, "site-tool"), filepath.Join(work, "site")
	for _, args := range [][]string{{"go", "build", "-C", "internal/tools/site", "-o", tool, "."}, {tool, "-out", dir}} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return "", fmt.Errorf("%s: %w", strings.Join(args, " "), err)
		}
	}
	var files []file
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		files = append(files, file{name, text, 0o644})
		return err
	})
	if err != nil {
		return "", err
	}
	return pack(fmt.Sprintf("kvasir-%s-site", version), files, date, out)
}

// pack writes FOLDER.tar.gz, which contains the files in a folder of that name.
func pack(folder string, files []file, date time.Time, out string) (string, error) {
	files = slices.Clone(files)
	for i := range files {
		files[i].path = folder + "/" + files[i].path
	}
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the header has neither a name nor a time
	if err != nil {
		return "", err
	}
	if err := writeTar(z, files, date); err != nil {
		return "", err
	}
	if err := z.Close(); err != nil {
		return "", err
	}
	name := folder + ".tar.gz"
	return name, os.WriteFile(filepath.Join(out, name), packed.Bytes(), 0o644)
}

// writeTar writes the files, owned by root, in their order.
func writeTar(w io.Writer, files []file, date time.Time) error {
	t := tar.NewWriter(w)
	for _, f := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.path, Size: int64(len(f.text)), Mode: f.mode, ModTime: date, Format: tar.FormatUSTAR}
		if f.mode&0o40000 != 0 {
			header.Typeflag, header.Mode = tar.TypeDir, f.mode&0o7777
		}
		if err := t.WriteHeader(header); err != nil {
			return err
		}
		if _, err := t.Write(f.text); err != nil {
			return err
		}
	}
	return t.Close()
}
