"""What a module has to offer to be exported: nothing registered, nothing inherited.

Three shapes; `examples/own` has a recipe for each, and `tfmx export path/to/file.py:factory -o bundle` exports what the factory returns.

**An encoder** says what it takes and gives (declarations.py), and that is all. It gives (B, size) for the whole input or
(B, T, size) for each element:

    class MyEncoder(nn.Module):
        def inputs(self): return tokens(vocab_size=32000, length=512)
        def outputs(self): return classes(3)
        def forward(self, input_ids, attention_mask): ...

**A decoder** says in `state_spec` what it carries from step to step, takes it as `state` and gives the new one:

    class MyDecoder(nn.Module):
        def inputs(self): return tokens(vocab_size=32000, length=1024)
        def outputs(self): return token_logits(32000)
        def state_spec(self) -> StateSpec: ...
        def forward(self, input_ids, attention_mask, position_ids, state): return logits, new_state

(`vocab_size = 32000` and `max_context = 1024` say the same as these two declarations.) With vectors in, or values or classes
out, it is a causal regressor or classifier.

**An encoder-decoder** has `encode` besides, and `fixed` states, which encode computes once from the source; `inputs` is the source:

        max_context = 64  # the longest answer
        decoder_start_token_id = 1
        def encode(self, input_ids, attention_mask): return hidden, fixed_states
        def forward(self, target_ids, attention_mask, position_ids, state, encoder_attention_mask): return logits, new_state

The first parameter is the input, whatever it is called. The others come by name, if the module has parameters of these names;
parameters of other names must have defaults, and are left alone:

| name                     | what                                                                                         |
|--------------------------|----------------------------------------------------------------------------------------------|
| `attention_mask`         | int64, 1 = real. encode: (B, T), each row's real elements first. A decoder: (B, P+T), past columns first |
| `position_ids`           | int64 (B, T): how many real elements stand before each in its row                            |
| `state`                  | a list of tensors, in the order of `state_spec`; returned without the fixed ones             |
| `encoder_attention_mask` | int64 (B, S), of the source                                                                  |

Pads must not change what real elements get. A decoder must ask for the mask. An encoder may do without: inputs of different
lengths are then never run together. `vectors` and `images` come in the module's precision.

Optional attributes: `eos_token_ids`, `tokenizer_json` (a text), and `reference`, the plain forward that was meant: it is given whole
sequences (an encoder-decoder's source and target) and nothing else, and `tfmx export` holds the steps to what it gives.
"""
