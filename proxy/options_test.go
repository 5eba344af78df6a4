// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/proxy"
)

// The address of an engine that is refused for its login is named without it.
func TestRefusedAddressHidesItsLogin(t *testing.T) {
	err := proxy.Options{Engines: []string{"http://u:SECRET@10.0.0.1:8000"}}.Validate()
	if err == nil || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), "10.0.0.1:8000") {
		t.Errorf("%v", err)
	}
}
