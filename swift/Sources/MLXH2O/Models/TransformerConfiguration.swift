import Foundation
import MLXLMCommon

/// `config.json` of Llama, Mistral, Qwen2 and Qwen3 models.
struct TransformerConfiguration: Decodable, Sendable {
    let modelType: String
    let hiddenSize: Int
    let layers: Int
    let intermediateSize: Int
    let heads: Int
    let kvHeads: Int
    let headWidth: Int
    let normEpsilon: Float
    let vocabularySize: Int
    let ropeBase: Float
    let ropeTraditional: Bool
    let ropeScaling: [String: StringOrNumber]?
    let maxPositions: Int?
    let tiesEmbeddings: Bool
    /// Whether queries, keys and values have biases.
    let projectionBias: Bool
    /// Whether attention's output has one.
    let outputBias: Bool
    let mlpBias: Bool
    /// Whether queries and keys are normalised per head.
    let normalisesHeads: Bool

    private enum Key: String, CodingKey {
        case model_type, hidden_size, num_hidden_layers, intermediate_size, num_attention_heads
        case num_key_value_heads, head_dim, rms_norm_eps, vocab_size, rope_theta, rope_traditional
        case rope_scaling, max_position_embeddings, tie_word_embeddings, attention_bias, mlp_bias
    }

    init(from decoder: any Decoder) throws {
        let json = try decoder.container(keyedBy: Key.self)
        func optional<Value: Decodable>(_ key: Key) throws -> Value? {
            try json.decodeIfPresent(Value.self, forKey: key)
        }
        modelType = try json.decode(String.self, forKey: .model_type)
        hiddenSize = try json.decode(Int.self, forKey: .hidden_size)
        layers = try json.decode(Int.self, forKey: .num_hidden_layers)
        intermediateSize = try json.decode(Int.self, forKey: .intermediate_size)
        heads = try json.decode(Int.self, forKey: .num_attention_heads)
        kvHeads = try optional(.num_key_value_heads) ?? heads
        headWidth = try optional(.head_dim) ?? hiddenSize / heads
        normEpsilon = try json.decode(Float.self, forKey: .rms_norm_eps)
        vocabularySize = try json.decode(Int.self, forKey: .vocab_size)
        let llama = modelType == "llama" || modelType == "mistral"
        ropeBase = try optional(.rope_theta) ?? (llama ? 10_000 : 1_000_000)
        ropeTraditional = try optional(.rope_traditional) ?? false
        ropeScaling = try optional(.rope_scaling)
        maxPositions = try optional(.max_position_embeddings)
        tiesEmbeddings = try optional(.tie_word_embeddings) ?? llama
        let bias = try llama ? optional(.attention_bias) ?? false : false
        projectionBias = modelType == "qwen2" || bias
        outputBias = bias
        mlpBias = try llama ? optional(.mlp_bias) ?? false : false
        normalisesHeads = modelType == "qwen3"
    }
}
