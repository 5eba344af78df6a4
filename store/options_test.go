// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/store"
)

// No number means "off" by being negative.
func TestValidate(t *testing.T) { testkit.CheckNumbers[store.Options](t) }
