// SPDX-License-Identifier: Apache-2.0

package vllm

import "golang.org/x/sys/unix"

// pollHangup reports a peer that has closed its side.
const pollHangup = unix.POLLRDHUP
