import MLX
import MLXLMCommon

/// A model of text.
public protocol LLMModel: LanguageModel, LoRAModel {
    /// How a chat becomes what the template is given.
    func messageGenerator(tokenizer: Tokenizer) -> MessageGenerator
}

extension LLMModel {
    public func messageGenerator(tokenizer: Tokenizer) -> MessageGenerator {
        DefaultMessageGenerator()
    }

    /// Takes the prompt in by chunks and leaves the last one to the iterator.
    public func prepare(
        _ input: LMInput, cache: [KVCache], windowSize: Int?
    ) throws -> PrepareResult {
        let chunk = windowSize ?? 512
        var rest = input.text
        withPreparedCache(cache, lengths: rest.sequenceLengths) {
            var state: LMOutput.State?
            while rest.tokens.size > chunk {
                let output = self(
                    rest[.newAxis, ..<chunk], cache: cache.isEmpty ? nil : cache, state: state)
                state = output.state
                asyncEval(cache)
                rest = rest[chunk...]
            }
            eval(cache)
        }
        return .tokens(rest)
    }
}
