// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestOptionsValidate(t *testing.T) {
	testkit.CheckNumbers[Options](t)
	testkit.CheckNumbers[TargetOptions](t)
}
