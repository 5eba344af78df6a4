// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// Prompt is a text with many facts. Its end asks for one of them.
type Prompt struct {
	Text   string `json:"text"`
	Needle string `json:"needle"` // what a model answers that reads the text well
}

var adjectives = strings.Fields("amber broken copper distant eastern frozen gentle hollow iron jagged lower marble narrow oaken painted quiet rusty silver tall upper velvet western yellow zinc")

var nouns = strings.Fields("anchor bridge cellar drawer engine ferry garden harbor island jetty kettle lantern mill needle orchard pump quarry river stable tower valley wagon yard zeppelin")

// tokensOfFact is about how many tokens one fact takes.
const tokensOfFact = 16

// newPrompt returns a prompt of about as many tokens as the parameter tokens says. It is random, so no engine has seen it before. The
// fact that it asks for may be anywhere in the text.
func newPrompt(rnd *rand.Rand, tokens int) Prompt {
	facts := max(2, tokens/tokensOfFact)
	asked := rnd.IntN(facts)
	var b strings.Builder
	fmt.Fprintf(&b, "Register %016x.\n", rnd.Uint64())
	question, needle := "", ""
	for i := range facts {
		thing := fmt.Sprintf("%s %s %d", adjectives[rnd.IntN(len(adjectives))], nouns[rnd.IntN(len(nouns))], i)
		code := fmt.Sprintf("%05d", rnd.IntN(100_000))
		fmt.Fprintf(&b, "The code of the %s is %s.\n", thing, code)
		if i == asked {
			question, needle = thing, code
		}
	}
	fmt.Fprintf(&b, "Question: What is the code of the %s?\nAnswer: The code of the %s is", question, question)
	return Prompt{b.String(), needle}
}
