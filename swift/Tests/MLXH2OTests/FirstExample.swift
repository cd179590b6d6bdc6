import MLXH2O
import MLXLLM
import MLXLMCommon

/// Call it once, before you load a model.
func prepare() async {
    await H2OModels.register()
}

func answer(_ prompt: String, with container: ModelContainer) async throws -> String {
    let session = H2OChatSession(container, instructions: "Be brief.")
    var reply = ""
    for try await text in session.streamResponse(to: prompt) { reply += text }
    for notice in await session.notices { print(notice) }
    return reply
}
