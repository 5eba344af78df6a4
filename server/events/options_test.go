// SPDX-License-Identifier: Apache-2.0

package events

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestValidate(t *testing.T) {
	testkit.CheckNumbers[Options](t)
	testkit.CheckNumbers[PublisherOptions](t)
}
