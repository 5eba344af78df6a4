// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// tokenCmd creates a token.
type tokenCmd struct {
	Name  string `arg:"" help:"Name of the token, one word: who has it."`
	Scope string `help:"What it allows. read: figures, status and lists; write: also requests, registrations and pins; admin: everything." enum:"read,write,admin" default:"read"`
	Until string `help:"When it ends: a date (2027-01-31), or a time of RFC 3339." placeholder:"DATE"`
	File  string `help:"File for --token-file, to which the line is added; it is made when it is missing. Without, the line is printed after the token." placeholder:"FILE"`
}

// Help returns the text that kvasir token --help shows. It implements kong's detailed help.
func (tokenCmd) Help() string {
	return `Prints a new token, once. The file has its SHA-256 alone; delete the line, and the token ends within 10 seconds.

Examples:
  kvasir token prometheus --file /etc/kvasir/tokens
  kvasir token ops --scope admin --until 2027-01-31 --file /etc/kvasir/tokens
  KVASIR_TOKEN=$(kvasir token me --scope admin --file tokens)
  kvasir server --token-file tokens &
  KVASIR_TOKEN=$KVASIR_TOKEN kvasir status`
}

// Run creates the token and prints it.
func (c *tokenCmd) Run(e *env) error {
	scope, err := auth.ParseScope(c.Scope)
	if err != nil {
		return usagef("--scope: %v", err)
	}
	var until time.Time
	if c.Until != "" {
		if until, err = auth.ParseUntil(c.Until); err != nil {
			return usagef("--until: %v", err)
		}
	}
	secret, line, err := auth.NewToken(c.Name, scope, until)
	if err != nil {
		return usagef("%v", err)
	}
	if c.File == "" {
		_, err = fmt.Fprintf(e.stdout, "%s\n%s\n", secret, line)
		return err
	}
	if err := addLine(c.File, c.Name, line); err != nil {
		return err
	}
	_, err = fmt.Fprintln(e.stdout, secret)
	return err
}

// addLine adds the line of a token to a file. Readers see either the old file or the new one. The file keeps its mode and its owner.
func addLine(path, name, line string) (err error) {
	if to, err := os.Readlink(path); err == nil {
		return fmt.Errorf("%s is a link to %s: name the file itself", path, to)
	}
	mode := fs.FileMode(0o600)
	text, err := auth.ReadSecret(path, auth.MaxTokenFile)
	var before os.FileInfo
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	default:
		if before, err = os.Stat(path); err != nil {
			return err
		}
		mode = before.Mode().Perm()
	}
	for l := range strings.Lines(string(text)) {
		if words := strings.Fields(l); len(words) > 0 && words[0] == name {
			return fmt.Errorf("%s has a token %q already: delete its line to end it, or choose another name", path, name)
		}
	}
	if len(text) > 0 && text[len(text)-1] != '\n' {
		line = "\n" + line
	}
	next := path + ".new"
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is there: another kvasir token writes it, or one was killed; remove it then", next)
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(next))
		}
	}()
	_, err = f.WriteString(string(text) + line + "\n")
	if before != nil {
		of := before.Sys().(*syscall.Stat_t)
		err = errors.Join(err, f.Chown(int(of.Uid), int(of.Gid)))
	}
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(next, path)
}
