// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"strings"
)

var revisionPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// parseRevisions parses the values of --model-revision: one revision for each model.
func parseRevisions(flags []string) (map[string]string, error) {
	out := make(map[string]string, len(flags))
	for _, text := range flags {
		at := strings.LastIndex(text, "=")
		if at < 1 || !revisionPattern.MatchString(text[at+1:]) {
			return nil, fmt.Errorf("--model-revision %.80q is not NAME=REV, with 1 to 64 letters, digits, dots, dashes and underscores as REV", text)
		}
		if _, twice := out[text[:at]]; twice {
			return nil, fmt.Errorf("--model-revision names %.80q twice", text[:at])
		}
		out[text[:at]] = text[at+1:]
	}
	return out, nil
}
