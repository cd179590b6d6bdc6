import MLX
import MLXLMCommon
import MLXNN

public struct LlamaConfiguration: Codable, Sendable {
    var hiddenSize: Int
    var hiddenLayers: Int
    var vocabularySize: Int
    var kvHeads: Int

    enum CodingKeys: String, CodingKey {
        case hiddenSize = "hidden_size"
        case hiddenLayers = "num_hidden_layers"
        case vocabularySize = "vocab_size"
        case kvHeads = "num_key_value_heads"
    }
}

/// The stock Llama as far as it is asked what it knows beside its layers; it cannot generate.
public class LlamaModel: Module, LLMModel, KVCacheDimensionProvider {
    public let vocabularySize: Int
    public let kvHeads: [Int]
    @ModuleInfo(key: "lm_head") var lmHead: Linear

    public init(_ c: LlamaConfiguration) {
        vocabularySize = c.vocabularySize
        kvHeads = Array(repeating: c.kvHeads, count: c.hiddenLayers)
        super.init()
        _lmHead.wrappedValue = Linear(c.hiddenSize, c.vocabularySize, bias: false)
    }

    public var loraLayers: [Module] { [] }

    /// Some templates of this family take a system message, some refuse it.
    public func messageGenerator(tokenizer: any Tokenizer) -> any MessageGenerator {
        let probe = [["role": "system", "content": "test"]]
        do {
            _ = try tokenizer.applyChatTemplate(
                messages: probe, tools: nil, additionalContext: nil)
            return DefaultMessageGenerator()
        } catch {
            return NoSystemMessageGenerator()
        }
    }
}
