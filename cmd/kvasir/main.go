// SPDX-License-Identifier: Apache-2.0

// Command kvasir is the KV-cache data plane for LLM serving: see kvasir --help.
package main

import (
	"os"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
}
