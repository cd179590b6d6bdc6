import MLXLMCommon

/// Makes models by their types; this one loads none.
public final class LLMModelFactory: Sendable {
    public let typeRegistry: ModelTypeRegistry<LanguageModel>

    public init(
        typeRegistry: ModelTypeRegistry<LanguageModel>, modelRegistry: AbstractModelRegistry
    ) {
        self.typeRegistry = typeRegistry
    }

    public static let shared = LLMModelFactory(
        typeRegistry: LLMTypeRegistry.shared, modelRegistry: LLMRegistry.shared)
}

public enum LLMRegistry {
    public static let shared = AbstractModelRegistry()
}
