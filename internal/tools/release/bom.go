// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// writeBOM writes the modules in the binary (go version -m) as a CycloneDX list. Its serial number is derived from the binary.
func writeBOM(b *build, out string) (string, error) {
	text, err := os.ReadFile(b.binary)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	purl := func(path, version string) string { return "pkg:golang/" + path + "@" + version }
	main := cdx.Component{
		BOMRef: purl(b.info.Main.Path, "v"+b.version), Type: cdx.ComponentTypeApplication, Name: "kvasir", Version: b.version,
		PackageURL: purl(b.info.Main.Path, "v"+b.version) + "?goos=" + b.system + "&goarch=" + b.arch,
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sum)}},
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}
	modules := slices.Clone(b.info.Deps)
	slices.SortFunc(modules, func(a, b *debug.Module) int { return strings.Compare(a.Path, b.Path) })
	components := []cdx.Component{{
		BOMRef: purl("std", strings.TrimPrefix(b.info.GoVersion, "go")), Type: cdx.ComponentTypeLibrary, Name: "std",
		Version: b.info.GoVersion, PackageURL: purl("std", strings.TrimPrefix(b.info.GoVersion, "go")),
	}}
	var refs []string
	for _, m := range modules {
		if m.Replace != nil {
			return "", fmt.Errorf("module %s is replaced: a release has none of those", m.Path)
		}
		components = append(components, cdx.Component{BOMRef: purl(m.Path, m.Version), Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: purl(m.Path, m.Version)})
	}
	for _, c := range components {
		refs = append(refs, c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.SerialNumber = uuid(sum)
	bom.Metadata = &cdx.Metadata{Timestamp: b.date.Format(time.RFC3339), Component: &main}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: main.BOMRef, Dependencies: &refs}}
	var packed bytes.Buffer
	if err := cdx.NewBOMEncoder(&packed, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return "", err
	}
	name := fmt.Sprintf("kvasir-%s-%s-%s.cdx.json", b.version, b.system, b.arch)
	return name, os.WriteFile(filepath.Join(out, name), packed.Bytes(), 0o644)
}

// uuid returns a version 8 UUID (RFC 9562: its bits are chosen by the application) that is derived from a checksum.
func uuid(sum [32]byte) string {
	u := sum
	u[6], u[8] = u[6]&0x0f|0x80, u[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:16])
}
