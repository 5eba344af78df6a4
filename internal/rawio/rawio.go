// SPDX-License-Identifier: Apache-2.0

package rawio

// maxVec is the largest number of buffers in one Writev: the kernel's IOV_MAX.
const maxVec = 1024
