import Foundation
import MLXLMCommon

private func decode<C: Codable>(_ type: C.Type, _ data: Data) throws -> C {
    let decoder = JSONDecoder()
    decoder.allowsJSON5 = true
    return try decoder.decode(type, from: data)
}

/// The model types that a loader may make.
public enum LLMTypeRegistry {
    public static let shared: ModelTypeRegistry<LanguageModel> = .init(creators: [
        "llama": { try LlamaModel(decode(LlamaConfiguration.self, $0)) },
        "mistral": { try LlamaModel(decode(LlamaConfiguration.self, $0)) },
        "qwen3": { try Qwen3Model(decode(Qwen3Configuration.self, $0)) },
    ])
}
