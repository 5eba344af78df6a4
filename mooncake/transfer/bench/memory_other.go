// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package bench

func prepare([]byte) {}
