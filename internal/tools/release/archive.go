// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// writeArchive writes kvasir-VERSION-linux-ARCH.tar.gz, with one folder of that name.
func writeArchive(b *build, out string) (string, error) {
	folder := fmt.Sprintf("kvasir-%s-linux-%s", b.version, b.arch)
	files := make([]file, len(b.files))
	for i, f := range b.files {
		files[i] = file{folder + "/" + f.path, f.text, f.mode}
	}
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression) // without a name or a time
	if err != nil {
		return "", err
	}
	if err := writeTar(z, files, b.date); err != nil {
		return "", err
	}
	if err := z.Close(); err != nil {
		return "", err
	}
	name := folder + ".tar.gz"
	return name, os.WriteFile(filepath.Join(out, name), packed.Bytes(), 0o644)
}

// writeTar writes files of root, in their order.
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
