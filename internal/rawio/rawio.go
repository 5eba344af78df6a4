// SPDX-License-Identifier: Apache-2.0

package rawio

// maxVec is how many buffers one Writev takes: the kernel's IOV_MAX.
const maxVec = 1024
