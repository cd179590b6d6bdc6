import Foundation
import MLXLMCommon

/// The model types that a loader may make.
public enum LLMTypeRegistry {
    public static let shared: ModelTypeRegistry<LanguageModel> = .init(creators: [
        "qwen3": {
            try Qwen3Model(JSONDecoder().decode(Qwen3Configuration.self, from: $0))
        }
    ])
}
