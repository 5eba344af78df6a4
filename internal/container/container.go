// SPDX-License-Identifier: Apache-2.0

// Package container has containers for data that lives long under a mutex: PagedSlice and PagedQueue grow by pages, so
// no growth takes long and what they hold never moves; Ring numbers its values, so a slow reader learns that it lost some.
package container
