// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
)

// completionCmd prints a completion script for a shell.
type completionCmd struct {
	Shell string `arg:"" help:"bash, zsh or fish." enum:"bash,zsh,fish"`
}

// Help returns the text that kvasir completion --help shows. It implements kong's detailed help.
func (completionCmd) Help() string {
	return `Examples:
  source <(kvasir completion bash)                                    (in ~/.bashrc)
  source <(kvasir completion zsh)                                     (in ~/.zshrc, after compinit)
  kvasir completion fish > ~/.config/fish/completions/kvasir.fish`
}

// Run prints the script.
func (c *completionCmd) Run(e *env) error {
	_, err := io.WriteString(e.stdout, settings.CompletionScript(c.Shell, e.model.Node))
	return err
}
