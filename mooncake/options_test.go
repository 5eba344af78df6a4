// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestOptionsValidate(t *testing.T) {
	testkit.CheckNumbers[SenderOptions](t)
	testkit.CheckNumbers[ReceiverOptions](t)
}
