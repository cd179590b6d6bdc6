import Foundation
import MLXLLM
import MLXLMCommon

/// The stock model of a configuration that one of this package's is made of: whatever it knows beside
/// its layers (whether its template takes a system message, how it calls tools, which configurations
/// it refuses) is asked of it. Its weights are never computed.
///
/// - Returns: nil for a type whose stock model knows nothing more.
/// - Throws: What the stock model throws, and ``H2OError/configuration(_:)`` for what is no such
///   model in spite of its type.
func stockModel(_ data: Data) throws -> (any LLMModel)? {
    let decoder = JSONDecoder()
    decoder.allowsJSON5 = true
    let kind = try decoder.decode(ModelKind.self, from: data)
    if let other = kind.architectures?.first(where: rankingArchitectures.contains) {
        let others = H2OModels.modelTypes.filter { $0 != kind.type }
        throw H2OError.configuration(
            "\(other) is a reranker of type \"\(kind.type)\", and there are only models that generate "
                + "where H2OModels.register(_:for:) was called for that type. To load it too, register "
                + "with `for: \(others)`, or load bounded models by H2OModels.factory(_:) and register "
                + "none.")
    }
    switch kind.type {
    case "llama", "mistral":
        return LlamaModel(try decoder.decode(LlamaConfiguration.self, from: data))
    case "qwen3": return Qwen3Model(try decoder.decode(Qwen3Configuration.self, from: data))
    default: return nil
    }
}

// What mlx-swift-lm's main branch makes of type "qwen3" by its architecture.
private let rankingArchitectures: Set = ["JinaForRanking"]

private struct ModelKind: Decodable {
    let type: String
    let architectures: [String]?

    private enum CodingKeys: String, CodingKey {
        case type = "model_type"
        case architectures
    }
}

/// Conventions that stock models of mlx-swift-lm's main branch declare, and those of 3.31.4 do not:
/// there these stand for them.
protocol StockConventions {}

/// The type of a convention that is not known.
struct Undeclared: Sendable {}

extension StockConventions {
    var toolCallFormat: Undeclared? { nil }
    var reasoningConfig: Undeclared? { nil }
}

extension LlamaModel: StockConventions {}
extension Qwen3Model: StockConventions {}
