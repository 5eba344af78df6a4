// SPDX-License-Identifier: Apache-2.0

package costmodel

// GPU is one accelerator, with the figures of its data sheet: dense bf16, no sparsity.
type GPU struct {
	Name      string  `json:"name"`
	Bandwidth float64 `json:"bandwidth"`  // bandwidth of its memory, in bytes per second
	FLOPS     float64 `json:"flops"`      // bf16, dense
	MemoryGiB float64 `json:"memory_gib"` // memory that CUDA sees
}

// Model is a dense transformer with grouped-query attention.
type Model struct {
	Name            string  `json:"name"`
	Layers          int     `json:"layers"`
	Hidden          int     `json:"hidden"`
	Heads           int     `json:"heads"`
	KVHeads         int     `json:"kv_heads"`
	HeadDim         int     `json:"head_dim"`
	Vocabulary      int     `json:"vocabulary"`
	Parameters      float64 `json:"parameters"`       // number of all parameters
	LayerParameters float64 `json:"layer_parameters"` // number of parameters without embedding table and head
	LayerBytes      float64 `json:"layer_bytes"`      // bytes of one parameter of a layer: 2 in bf16
}

// KVBytes returns the bytes of KV of one token, over all layers and ranks.
func (m *Model) KVBytes() float64 { return 2 * float64(m.Layers*m.KVHeads*m.HeadDim) * 2 }

// head returns the number of parameters of the head; the embedding table has the same number.
func (m *Model) head() float64 { return float64(m.Vocabulary) * float64(m.Hidden) }

// WeightBytes returns how many bytes the weights take in memory.
func (m *Model) WeightBytes() float64 {
	return m.LayerParameters*m.LayerBytes + (m.Parameters-m.LayerParameters)*2
}

// StepBytes returns how many bytes of weights one step reads: those of all layers and the head.
func (m *Model) StepBytes() float64 { return m.LayerParameters*m.LayerBytes + m.head()*2 }

// LinearFLOPs returns the operations for one token in the layers, without attention.
func (m *Model) LinearFLOPs() float64 { return 2 * m.LayerParameters }

// AttentionFLOPs returns the floating-point operations of attention for one token, per token of its context.
func (m *Model) AttentionFLOPs() float64 { return 4 * float64(m.Layers*m.Heads*m.HeadDim) }

// HeadFLOPs returns the floating-point operations of the language model head for one sampled token.
func (m *Model) HeadFLOPs() float64 { return 2 * m.head() }

// The GPUs of the profiles. Sources: NVIDIA's data sheets.
var (
	a10  = GPU{"A10", 600e9, 125e12, 22.5}
	h100 = GPU{"H100 SXM", 3.35e12, 989e12, 79.1}
	h800 = GPU{"H800 SXM", 3.35e12, 989e12, 79.1}
)

// The models of the profiles. Sources: their config.json and the sizes of their tensors.
var (
	qwen25 = Model{
		Name: "Qwen2.5-7B-Instruct", Layers: 28, Hidden: 3584, Heads: 28, KVHeads: 4, HeadDim: 128, Vocabulary: 152064,
		Parameters: 7_615_616_512, LayerParameters: 6_525_621_760, LayerBytes: 2,
	}
	// A parameter has 4 bits, and each 128 parameters a 16-bit scale; embedding table and head stay in 16 bits.
	qwen25Int4 = Model{
		Name: "Qwen2.5-7B-Instruct-GPTQ-Int4", Layers: 28, Hidden: 3584, Heads: 28, KVHeads: 4, HeadDim: 128, Vocabulary: 152064,
		Parameters: 7_615_616_512, LayerParameters: 6_525_621_760, LayerBytes: 0.516,
	}
	llama31 = Model{
		Name: "Llama-3.1-8B", Layers: 32, Hidden: 4096, Heads: 32, KVHeads: 8, HeadDim: 128, Vocabulary: 128256,
		Parameters: 8_030_261_248, LayerParameters: 6_979_588_096, LayerBytes: 2,
	}
	qwen3 = Model{
		Name: "Qwen3-8B", Layers: 36, Hidden: 4096, Heads: 32, KVHeads: 8, HeadDim: 128, Vocabulary: 151936,
		Parameters: 8_190_735_360, LayerParameters: 6_946_075_648, LayerBytes: 2,
	}
	llama70 = Model{
		Name: "70B", Layers: 80, Hidden: 8192, Heads: 64, KVHeads: 8, HeadDim: 128, Vocabulary: 128256,
		Parameters: 70_553_706_496, LayerParameters: 68_452_360_192, LayerBytes: 2,
	}
)
