// SPDX-License-Identifier: Apache-2.0

package paged_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
