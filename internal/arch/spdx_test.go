// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

const spdx = "// SPDX-License-Identifier: Apache-2.0\n\n"

// Each source file that is not generated begins with its licence.
func TestSourceFilesNameTheirLicence(t *testing.T) {
	for _, p := range read(t) {
		for _, f := range slices.Concat(p.files, p.tests) {
			if !strings.HasPrefix(string(f.text), spdx) && !ast.IsGenerated(f.tree) {
				t.Errorf("%s does not begin with the line %q and a blank one", f.path, strings.TrimSpace(spdx))
			}
		}
	}
}
