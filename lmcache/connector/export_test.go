// SPDX-License-Identifier: Apache-2.0

package connector

// Pool returns an engine_driven worker's registration.
func (a *Worker) Pool() *PoolClient { return a.pool }
