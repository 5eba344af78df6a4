// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// writeImage writes an image without a base image, for docker load and podman load: the binary, the license and a user. It has no
// certificates; a volume must provide them. It runs as user 65532; beside engines it must run as their user.
func writeImage(b *build, out string) (string, error) {
	files := []file{{"etc/", nil, 0o40755}, {"etc/passwd", []byte("root:x:0:0:root:/:/sbin/nologin\nkvasir:x:65532:65532:kvasir:/:/sbin/nologin\n"), 0o644}, {"tmp/", nil, 0o41777}, {"usr/", nil, 0o40755}, {"usr/bin/", nil, 0o40755}}
	for _, f := range b.files {
		switch f.path {
		case "kvasir":
			files = append(files, file{"usr/bin/kvasir", f.text, 0o755})
		case "LICENSE":
			files = append(files, file{"LICENSE", f.text, 0o644})
		}
	}
	var layer bytes.Buffer
	if err := writeTar(&layer, files, b.date); err != nil {
		return "", err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		return "", err
	}
	image, err := mutate.Append(empty.Image, mutate.Addendum{Layer: l, History: v1.History{Created: v1.Time{Time: b.date}, CreatedBy: "kvasir release"}})
	if err != nil {
		return "", err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return "", err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", b.arch, v1.Time{Time: b.date}
	config.Config = v1.Config{
		User: "65532:65532", Entrypoint: []string{"/usr/bin/kvasir"}, Cmd: []string{"server"}, Env: []string{"PATH=/usr/bin"}, StopSignal: "SIGTERM",
		Labels: map[string]string{
			"org.opencontainers.image.title": "kvasir", "org.opencontainers.image.version": b.version, "org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.source": "https://github.com/kvasir-kv/kvasir", "org.opencontainers.image.description": "The KV-cache data plane for LLM serving",
		},
	}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return "", err
	}
	tag, err := name.NewTag("kvasir:" + b.version)
	if err != nil {
		return "", err
	}
	file := fmt.Sprintf("kvasir-%s-linux-%s.image.tar", b.version, b.arch)
	return file, tarball.WriteToFile(filepath.Join(out, file), tag, image)
}
