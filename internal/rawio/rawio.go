package rawio

// MaxVec is how many buffers one Writev takes: the kernel's IOV_MAX.
const MaxVec = 1024

// MaxCall bounds the bytes of one call that its users should make: while it
// copies, the scheduler can neither preempt it nor give its processor away.
const MaxCall = 1 << 20
