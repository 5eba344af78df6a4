// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
)

// manCmd writes the manual. The build of packages uses it.
type manCmd struct {
	Dir      string `arg:"" help:"Directory to write to; it is made if it is missing."`
	Markdown bool   `help:"Write Markdown instead: a page for each command of the first level, and README.md."`
}

// Help returns the text that kvasir man --help shows. It implements kong's detailed help.
func (manCmd) Help() string {
	return `One page for each command, of section 1. SOURCE_DATE_EPOCH gives the date of the pages.

Examples:
  kvasir man ./man && man ./man/kvasir-server.1
  kvasir man ~/.local/share/man/man1
  kvasir man --markdown ./reference`
}

// Run writes the pages.
func (c *manCmd) Run(e *env) error {
	date := time.Now()
	if text := os.Getenv("SOURCE_DATE_EPOCH"); text != "" {
		seconds, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH is %q: want seconds since 1970", text)
		}
		date = time.Unix(seconds, 0)
	}
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return err
	}
	pages := settings.ManPages(e.model.Node, release, date)
	if c.Markdown {
		pages = settings.MarkdownPages(e.model.Node)
	}
	for name, text := range pages {
		if err := os.WriteFile(filepath.Join(c.Dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(e.stdout, "%d pages are in %s\n", len(pages), c.Dir)
	return err
}
