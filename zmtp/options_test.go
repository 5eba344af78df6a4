// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestOptionsValidate(t *testing.T) {
	testkit.CheckNumbers[RouterOptions](t)
	testkit.CheckNumbers[DealerOptions](t)
	testkit.CheckNumbers[PubOptions](t)
}
