// SPDX-License-Identifier: Apache-2.0

package coordinator

// BlockUnits returns the number of hash units per block of a group.
func (c *Coordinator) BlockUnits(g int) int {
	return c.layout.Groups[g].Block / c.layout.HashUnit
}

// Blocks returns the number of whole blocks of a group in a prompt of units
// hash units; 0 for a group that is not cached.
func (c *Coordinator) Blocks(g, units int) int {
	if c.bySet[g] < 0 {
		return 0
	}
	return max(units, 0) / c.BlockUnits(g)
}

// Units returns the hash units that block i of a group covers. The digest of the last of them covers the whole prefix.
func (c *Coordinator) Units(g, i int) Run {
	k := c.BlockUnits(g)
	return Run{i * k, (i + 1) * k}
}

// AppendKey appends the hash under which the Coordinator's Release stores block i of
// a group: up to 0.23 the digests of its units one after the other, from 0.24 on
// the last unit's digest. Only where a block is one unit are the two equal, and only
// then can stores of the two generations read each other's blocks.
//
// digests are the digests of the prompt's hash units, size bytes each. AppendKey reports
// false, and appends nothing, when they do not reach to the block's end.
func (c *Coordinator) AppendKey(dst, digests []byte, size, g, i int) ([]byte, bool) {
	if i < 0 || size <= 0 || i >= c.Blocks(g, len(digests)/size) {
		return dst, false
	}
	u := c.Units(g, i)
	if !c.follows(joinsDigests) {
		u.Start = u.End - 1
	}
	return append(dst, digests[u.Start*size:u.End*size]...), true
}

// AppendUnitKey appends the hash under which a partly filled block is stored: the digest of
// unit, the last hash unit in the block. Only partial hits look for it.
func (c *Coordinator) AppendUnitKey(dst, digests []byte, size, unit int) ([]byte, bool) {
	if unit < 0 || size <= 0 || unit >= len(digests)/size {
		return dst, false
	}
	return append(dst, digests[unit*size:(unit+1)*size]...), true
}
