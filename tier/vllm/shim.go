// SPDX-License-Identifier: Apache-2.0

package vllm

import _ "embed"

// Shim is the Python module that vLLM loads as a secondary tier: kvasir_tier.py.
//
//go:embed kvasir_tier.py
var Shim []byte
