// SPDX-License-Identifier: Apache-2.0

// Package container has containers for data that is kept for long under a mutex. PagedSlice and PagedQueue grow by pages, so that no
// growth takes long and their elements never move. Ring numbers its values, so that a slow reader learns when it has lost some.
package container
